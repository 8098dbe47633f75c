"""SwiGLU between bf16 products: alone, and in the kernels of quantizers, whose codes are thrown away.

python benchmarks/steps/activation_passes.py OUTPUT COMMIT [--turns N]

A MoE layer in bf16 has a pass over fc1's result each way; all take turns in one process on a CUDA device, beside a copy
of as many bytes as the first of them moves. Results are compared bit by bit first.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from turns import arguments_of, timed, write

import octavo_registry as registry
from octavo_registry.contract import ActivationRequest
from octavo_registry.dispatch.fusing import UNREAD

sys.path.insert(0, str(Path(__file__).parent.parent))
from layers import MOE

VALUES, GRADIENT = ("activated",), ("activated", "dprobs")
BOTH = (*GRADIENT, "forward")
BYTES = {"forward": 6, "gradient": 10, "gradient and forward": 12}
"""That each must move for an element of [M, F]."""
BUSY_CYCLES = 500_000
"""A quarter of a millisecond, in which the host queues a pass."""


def plan_of(op: Any, k: int, experts: int) -> Any:
    """A function of torch-native, as a layer asks for it where nobody reads codes."""
    return registry.plan(
        ActivationRequest(
            op=op, framework="torch", device="cuda", in_dtype="bfloat16", out_dtype="bfloat16", quantizer=UNREAD,
            arch=torch.cuda.get_device_capability(), k=k, groups=experts, sizes="device", activation="swiglu",
        ),
        backend="torch-native",
    ).bound  # fmt: skip


def passes(rows: int, features: int, experts: int) -> dict[str, Callable[[], Any]]:
    """The extras of each pass, and the copy."""
    torch.manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    h, da, probs = draw(rows, 2 * features), draw(rows, features), torch.rand(rows, device="cuda")
    act, dact = plan_of("act_quantize", features, experts), plan_of("dact_quantize", 2 * features, experts)
    sizes = act.prepare(torch.full((experts,), rows // experts, device="cuda"), rows, h)
    source = draw(rows * features * BYTES["forward"] // 4)
    target = torch.empty_like(source)
    return {
        "forward": partial(act.values, h, sizes, probs=probs, wanted=VALUES),
        "forward, in a quantizer": lambda: act.run(h, sizes, probs=probs, wanted=VALUES)[1],
        "gradient": partial(dact.values, da, h, sizes, probs=probs, wanted=GRADIENT),
        "gradient, in a quantizer": lambda: dact.run(da, h, sizes, probs=probs, wanted=GRADIENT)[1],
        "gradient and forward": partial(dact.values, da, h, sizes, probs=probs, wanted=BOTH),
        "a copy": lambda: target.copy_(source),
    }


def same_bits(calls: dict[str, Callable[[], Any]]) -> bool:
    """Whether every way has the values, and the gradients of probabilities, of the others."""
    forward, gradient, both = (calls[name]() for name in ("forward", "gradient", "gradient and forward"))
    beside, gradient_beside = (calls[f"{name}, in a quantizer"]() for name in ("forward", "gradient"))
    pairs = [(forward.activated, beside.activated), (forward.activated, both.forward)]
    for made in (gradient_beside, both):
        pairs += [(gradient.activated, made.activated), (gradient.dprobs, made.dprobs)]
    return all(torch.equal(one, other) for one, other in pairs)


def main() -> None:
    """A row for each layer."""
    arguments, found = arguments_of(__doc__, 15), []
    for label, (tokens, choices, experts, _, features) in MOE.items():
        rows = tokens * choices
        calls = passes(rows, features, experts)
        same = same_bits(calls)
        times = {
            way: round(statistics.median(each), 4) for way, each in timed(calls, arguments.turns, BUSY_CYCLES).items()
        }
        rates = {way: round(rows * features * size / times[way] / 1e9, 2) for way, size in BYTES.items()}
        rates["a copy"] = round(rows * features * BYTES["forward"] / times["a copy"] / 1e9, 2)
        row = {"shape": label, "rows": rows, "features": features, "same_bits": same, "milliseconds": times}
        found.append({**row, "terabytes_per_second": rates})
        print(json.dumps(found[-1]), flush=True)
        torch.cuda.empty_cache()
    write(arguments.output, "activation_passes.py", arguments.commit, found)


if __name__ == "__main__":
    main()
