"""Steps lowered for chips that need not be here: `python lowered.py quick|all`, a JSON object a line.

Each is a layer's quantizers, a dequantizer, and the three GEMMs with a bias and into an accumulator; what jax-triton
compiles is what JAX would start.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

import octavo
from octavo import Recipe
from octavo.grouped_tensor import PLAIN
from octavo_jax_triton.backend import TritonBackend
from octavo_jax_triton.launch.launch_kernel import launch_kernel
from octavo_registry.contract import DequantizeRequest, GemmRequest, QuantizeRequest, Weight, readers

CHIPS = ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))
RECIPES = ("bf16", "fp8-delayed", "fp8-current", "fp8-row", "fp8-block", "mxfp8", "nvfp4")
M, K, N, G = 512, 256, 384, 4

_launched: Counter[str] = Counter()
_launch = launch_kernel


def _counted(kernel: Any, *rest: Any, **constants: Any) -> Any:
    _launched[kernel.__name__] += 1
    return _launch(kernel, *rest, **constants)


def step_of(recipe: Recipe, arch: tuple[int, int], weight: Weight) -> Any:
    """A function of x, w, dy, sizes and bias."""
    backend, where = TritonBackend(), ("jax", "cuda", "bfloat16", "bfloat16")
    bound: dict[str, Any] = {
        gemm: backend.bind(GemmRequest(gemm, *where, recipe=recipe, arch=arch, weight=weight))  # type: ignore[arg-type]
        for gemm in ("fprop", "dgrad", "wgrad")
    }

    def quantized(operand: Any, value: Any, sizes: Any) -> Any:
        spec = recipe.quantizer(operand)
        if spec is None:
            return value
        layouts = tuple(bound[gemm].layouts.get(operand, PLAIN) for gemm in readers(operand, weight))
        request = QuantizeRequest("quantize", *where, arch=arch, quantizer=spec, layouts=layouts)  # type: ignore[arg-type]
        scale = jnp.ones(G) if spec.scaling == "delayed" else None
        run: Any = backend.bind(request).run
        return run(value, None if operand == "w" else sizes, scale=scale, seed=1)

    def step(x: Any, w: Any, dy: Any, sizes: Any, bias: Any) -> list[Any]:
        operands = {name: quantized(name, value, sizes) for name, value in (("x", x), ("w", w), ("dy", dy))}
        y = bound["fprop"].run(operands["x"], operands["w"], sizes, bias=bias, bias_scales=jnp.ones(M))
        dx = bound["dgrad"].run(operands["dy"], operands["w"], sizes)
        held = jnp.zeros((G, N, K) if weight == "nk" else (G, K, N))
        results = [y, dx, bound["wgrad"].run(operands["x"], operands["dy"], sizes, out=held, accumulate=True)]
        spec = recipe.quantizer("x")
        if spec is not None:
            run: Any = backend.bind(DequantizeRequest("dequantize", *where, arch=arch, quantizer=spec)).run
            results += [run(operands["x"], direction) for direction in spec.directions]
        return results

    return step


def lowered(name: str, arch: tuple[int, int], weight: Weight) -> dict[str, Any]:
    """Which kernels were started, and the calls in the program."""
    _launched.clear()
    shapes = ((M, K), (G, N, K) if weight == "nk" else (G, K, N), (M, N))
    values = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (*shapes, (G, N))]
    sizes = jax.ShapeDtypeStruct((G,), jnp.int32)
    traced = jax.jit(step_of(octavo.recipe(name), arch, weight)).trace(*values[:3], sizes, values[3])
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    return {"calls": text.count("@triton_kernel_call_ffi("), "kernels": dict(_launched)}


def selection(quick: bool) -> Iterator[tuple[str, tuple[int, int], Weight]]:
    """Recipe, chip and order of the weight's axes; `quick`: the chip with most kernels, and the oldest."""
    if quick:
        yield from (("bf16", (9, 0), "kn"), ("fp8-block", (9, 0), "kn"), ("mxfp8", (8, 0), "nk"))
        return
    for arch in CHIPS:
        for name in RECIPES:
            yield name, arch, "nk"
            yield name, arch, "kn"


if __name__ == "__main__":
    for module in list(sys.modules.values()):
        if getattr(module, "launch_kernel", None) is _launch:
            module.launch_kernel = _counted  # type: ignore[attr-defined]
    for name, arch, weight in selection(sys.argv[1] == "quick"):
        facts = lowered(name, arch, weight)
        print(json.dumps({"recipe": name, "chip": list(arch), "weight": weight, **facts}), flush=True)
