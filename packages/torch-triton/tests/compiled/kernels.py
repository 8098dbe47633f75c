"""Every kernel compiled for chips that need not be here: `python kernels.py quick|all`, a JSON object a line.

The package's own functions are called on tensors of a CPU, with launches that are written down in the place of being
made: what is compiled is what they would start.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as SharedDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

import octavo
from octavo import Recipe
from octavo.grouped_tensor import PLAIN
from octavo_torch.plugin_api import DTYPE_NAMES
from octavo_torch_triton.arrays import launch, row_index
from octavo_torch_triton.gemm import hopper
from octavo_torch_triton.gemm import launches as gemm_launches
from octavo_torch_triton.gemm.gemm import Dgrad, Fprop, Wgrad
from octavo_torch_triton.moves import operators as moves
from octavo_torch_triton.quantizers import launches as quantizer_launches
from octavo_torch_triton.quantizers import operators
from octavo_torch_triton.quantizers.quantizer import Dequantizer, Quantizer
from octavo_triton.kernels.hopper.columns import hopper_columns
from octavo_triton.kernels.hopper.undivided_columns import undivided_columns
from octavo_triton.layouts import TURNED
from octavo_triton.products.spec import layouts_of

CHIPS = (80, 89, 90, 100, 120)
RECIPES = ("bf16", "fp8-delayed", "fp8-current", "fp8-row", "fp8-block", "mxfp8", "nvfp4")
FP32 = "fp32"
"""The recipe of high precision, of fp32 operands."""
M, K, N, G = 512, 256, 384, 4
_TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.uint8: "u8",
    torch.int16: "i16", torch.int32: "i32", torch.int64: "i64", torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5",
}  # fmt: skip
_QUICK_MOVES = (80,)
_QUICK_FP32 = (90,)
_QUICK_QUANTIZERS = {(90, "fp8-block"), (80, "mxfp8"), (80, "fp8-current")}
"""With powers of two, which are subtracted, in bytes, and divided."""
_QUICK_WGRADS = {(90, "fp8-block"): undivided_columns, (90, "fp8-current"): hopper_columns}
"""Those that need most registers."""


class Written(NamedTuple):
    """A launch: its kernel, what the kernel takes, and whose it is."""

    kernel: Any
    arguments: tuple[Any, ...]
    constants: dict[str, Any]


_written: list[Written] = []


def _write_down(kernel: Any, grid: Any, like: Tensor, arguments: tuple[Any, ...], **constants: Any) -> None:
    for argument in arguments:
        if isinstance(argument, Tensor) and argument.dtype is torch.int64:
            argument.zero_()  # sizes, which the next call checks
    _written.append(Written(kernel, arguments, {**launch.DEFAULTS, **constants}))


for module in (row_index, gemm_launches, hopper, quantizer_launches, operators, moves):
    module.start = _write_down  # type: ignore[attr-defined]
hopper.multiprocessors = lambda _: 132  # type: ignore[assignment]


def launches_of(recipe: Recipe, chip: Any, dtype: torch.dtype = torch.bfloat16) -> list[Written]:
    """Those of a layer's quantizers, one dequantizer, and the three GEMMs."""
    quantizer_launches.has_fp8_casts = lambda _: chip != "sm_80"  # type: ignore[assignment]
    _written.clear()
    sizes = torch.zeros(G, dtype=torch.int64)
    shapes: dict[Any, tuple[int, ...]] = {"x": (M, K), "w": (G, N, K), "dy": (M, N)}
    operands: dict[str, Any] = {}
    for operand, shape in shapes.items():
        tensor = torch.zeros(shape, dtype=dtype)
        spec = recipe.quantizer(operand)
        given = None if operand == "w" else sizes
        scale = torch.ones(G) if spec is not None and spec.scaling == "delayed" else None
        seed = 1 if spec is not None and spec.stochastic else None
        turned = TURNED if spec is not None and layouts_of("wgrad", chip, spec.scaling) else PLAIN
        operands[operand] = tensor if spec is None else Quantizer(spec, turned)(tensor, given, scale=scale, seed=seed)
    if recipe.quantizer("x") is not None:
        Dequantizer(torch.bfloat16)(operands["x"])
    bias, result = torch.zeros((G, N), dtype=dtype), DTYPE_NAMES[dtype]
    Fprop(chip, result)(operands["x"], operands["w"], sizes, bias=bias, bias_scales=torch.zeros(M))
    Dgrad(chip, result)(operands["dy"], operands["w"], sizes)
    out = torch.zeros((G, N, K))
    Wgrad(chip, "float32")(operands["x"], operands["dy"], sizes, out=out, accumulate=True)
    Wgrad(chip, result)(operands["x"], operands["dy"], sizes)
    _written.extend(
        [
            _without_roles(each)
            for each in _written
            if each.kernel is hopper_columns and not each.constants["ACCUMULATE"]
        ]
    )
    return _each_once()


def _without_roles(written: Written) -> Written:
    """The same wgrad as octavo-jax-triton starts it, whose blocks have 128 columns and which adds to nothing."""
    narrow = [
        replace(each, block_shape=[min(side, 128) for side in each.block_shape])
        if isinstance(each, SharedDescriptor)
        else each
        for each in written.arguments
    ]
    constants = {name: value for name, value in written.constants.items() if name != "ACCUMULATE"}
    return Written(undivided_columns, tuple(narrow), constants)


def launches_of_moves(dtype: torch.dtype) -> list[Written]:
    """Rows there and back with weights and without, and their products: of wide rows and of one column."""
    _written.clear()
    position = torch.zeros((M, 8), dtype=torch.int64)
    routed, weights = torch.zeros((M, 8), dtype=torch.bool), torch.zeros((M, 8))
    for columns in (2048, 1):
        x, rows = (torch.zeros((length, columns), dtype=dtype) for length in (M, 8 * M))
        for factors in (weights, None):
            moves.permute_rows(x, position.view(-1), position, routed, factors)
            moves.combine_rows(rows, position, routed, factors)
        moves.dot_rows(rows, x, position, routed)
    return _each_once()


def _product(written: Written) -> str | None:
    return "fp8" if isinstance(written.kernel, GluonJITFunction) else written.constants.get("PRODUCT")


def _each_once() -> list[Written]:
    return list(
        {(each.kernel.__name__, *map(str, _source(each).constants.items())): each for each in _written}.values()
    )


def _source(written: Written) -> Any:
    """As Triton's own launcher specializes it: aligned pointers, integers that 16 divides, ones as constants."""
    names: list[str] = written.kernel.arg_names
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    divisible = [["tt.divisibility", 16]]
    for place, name in enumerate(names):
        if place < len(written.arguments):
            value = written.arguments[place]
        else:
            value = written.constants.get(name, written.kernel.signature.parameters[name].default)
        if place >= len(written.arguments) or value is None or (isinstance(value, int) and value == 1):
            signature[name], constants[place,] = "constexpr", value
        elif isinstance(value, SharedDescriptor):
            signature[name] = f"tensordesc<{_TYPES[value.base.dtype]}{value.block_shape},{value.layout!r}>"
        elif isinstance(value, TensorDescriptor):
            signature[name] = f"tensordesc<{_TYPES[value.base.dtype]}{value.block_shape}>"
        elif isinstance(value, Tensor):
            signature[name], attributes[place,] = f"*{_TYPES[value.dtype]}", divisible
        else:
            signature[name] = "i32" if abs(value) < 1 << 31 else "i64"
            if value % 16 == 0:
                attributes[place,] = divisible
    source = GluonASTSource if isinstance(written.kernel, GluonJITFunction) else ASTSource
    return source(written.kernel, signature, constants, attributes)


def compile_for(written: Written, chip: int) -> dict[str, Any]:
    """What became of it: PTX words that tell, registers, spilled bytes, shared memory."""
    options = {name: value for name, value in written.constants.items() if name[0].islower()}
    made = triton.compile(_source(written), target=GPUTarget("cuda", chip, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
        printed = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    used = re.search(r"REG:(\d+) STACK:(\d+)", printed.stdout)
    assert used is not None, printed.stdout
    ptx = made.asm["ptx"]
    return {
        "registers": int(used[1]),
        "spilled": int(used[2]),
        "shared": made.metadata.shared,
        "warps": written.constants["num_warps"],
        "inexact": sorted(set(re.findall(r"\.ftz|\bfma\.rn\.f32|\b(?:div\.full|(?:div|rcp|sqrt)\.approx)", ptx))),
        "products": sorted(set(re.findall(r"\b(?:mma|wgmma|tcgen05)[\w.:]*", ptx))),
        "releases": _before_arrivals(ptx),
    }


def _before_arrivals(ptx: str) -> list[str]:
    """What was last in front of each arrival at an mbarrier: a barrier of warps, or a product."""
    events = re.findall(r"wgmma\.wait|\bbar(?:rier)?(?:\.cta)?\.sync|mbarrier\.arrive\.shared", ptx)
    before = [one for one, event in pairwise(events) if event == "mbarrier.arrive.shared"]
    return ["product" if one == "wgmma.wait" else "barrier" for one in before]


def selection(quick: bool) -> Iterator[tuple[int, str, Written]]:
    """Chip, recipe or "moves", and launch; `quick`: a forward product on each chip, and what few have."""
    for chip in CHIPS:
        for name in RECIPES:
            for written in launches_of(octavo.recipe(name), f"sm_{chip}"):
                is_gemm = _product(written) is not None
                telling = name == "fp8-block" or (chip == 100 and name in ("mxfp8", "nvfp4"))
                of_dgrad = written.constants.get("COLUMNWISE", written.constants.get("TURNED"))
                wanted = is_gemm and of_dgrad is False and telling
                if (chip, name) in _QUICK_WGRADS:
                    wanted |= written.kernel is _QUICK_WGRADS[chip, name] and not written.constants.get("ACCUMULATE")
                if not is_gemm and (chip, name) in _QUICK_QUANTIZERS:
                    wanted = written.kernel.__name__.startswith("quantize") and "STACKED" in written.constants
                    wanted = wanted and not written.constants["STACKED"]
                if wanted or not quick:
                    yield chip, name, written
        if chip in _QUICK_FP32 or not quick:
            for written in launches_of(octavo.HighPrecision(), f"sm_{chip}", torch.float32):
                if _product(written) is not None:
                    yield chip, FP32, written
        if chip in _QUICK_MOVES or not quick:
            for dtype in (torch.bfloat16, torch.float16, torch.float32)[: 1 if quick else None]:
                for written in launches_of_moves(dtype):
                    is_wide_and_weighted = written.constants["COLUMNS"] > 1 and written.arguments[3] is not None
                    if is_wide_and_weighted or not quick:
                        yield chip, "moves", written


if __name__ == "__main__":
    done = set()
    for arch, recipe_name, each in selection(sys.argv[1] == "quick"):
        key = (arch, str(_source(each).signature), each.kernel.__name__, str(sorted(each.constants.items(), key=str)))
        if key not in done:
            done.add(key)
            facts = compile_for(each, arch)
            facts |= {"chip": arch, "recipe": recipe_name, "kernel": each.kernel.__name__}
            print(json.dumps(facts | {"product": _product(each)}), flush=True)
