"""The whole path of a call: the registry's plan of octavo-torch-native, as a layer holds it."""

from __future__ import annotations

from typing import Any

import octavo_registry as registry
from octavo import OctavoError
from octavo_bench.harness.timing import Call
from octavo_bench.quantize.case import Case
from octavo_bench.quantize.problem import Setting
from octavo_native import layouts

BACKEND = "torch-native"


def bound_call(case: Case, setting: Setting, x: Any) -> Call | str:
    """A call of the bound quantizer, its allocations included; or the reason why there is none."""
    if case.kind not in ("quantize", "weights") or case.swiglu:
        return ""
    native = (layouts.NATIVE_ROWS, layouts.NATIVE_COLUMNS)
    arch = None
    if setting.cuda:
        import torch

        arch = torch.cuda.get_device_capability()
    stacked = setting.matrix_rows > 0
    request = registry.QuantizeRequest(
        op="quantize",
        framework="torch",
        device=setting.device,
        in_dtype=setting.dtype,
        out_dtype=setting.dtype,
        quantizer=case.spec,
        arch=arch,
        k=setting.cols,
        groups=len(setting.sizes),
        stacked=stacked,
        sizes="device" if setting.cuda else "host",
        layouts=native if case.native else (layouts.PLAIN, layouts.PLAIN),
    )
    try:
        run = registry.plan(request, backend=BACKEND).run
    except OctavoError as error:
        return f"no bound plan: {' '.join(str(error).split())}"
    arguments: dict[str, Any] = {"operand": case.operand}
    if case.recipe == "delayed":
        arguments["scale"] = setting.encode_scales
    if case.stochastic:
        arguments["seed"] = setting.rounding_seed.reshape(())
    rows = x.view(len(setting.sizes), setting.matrix_rows, setting.cols) if stacked else x
    sizes = None if stacked else setting.sizes_tensor
    return lambda: run(rows, sizes, **arguments)
