"""Programs for CUDA, made on a machine without a GPU: the targets and their attributes are in the text."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import Array

import octavo
import octavo_jax
import octavo_native
import octavo_registry
from octavo import QuantizerSpec
from octavo_jax.dispatch import device
from octavo_jax.policies import save_quantized
from octavo_jax_native.ffi.custom_call import workspace_result
from octavo_registry import Request

M, K, G = 64, 96, 3


def _text(function: Any, *arguments: Any, platform: str = "cuda") -> str:
    return str(jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,)).as_text())


@pytest.mark.parametrize("platform", ["cuda", "cpu"])
def test_targets_and_attributes(one_per_scaling: QuantizerSpec, platform: str) -> None:
    """One plan, one quantize call with both planes, one dequantize call; nothing of the host in between."""
    arguments: dict[str, Any] = {"seed": 5} if one_per_scaling.stochastic else {}
    if one_per_scaling.scaling == "delayed":
        arguments["scale"] = jnp.ones(G)

    def run(x: Array, sizes: Array) -> tuple[Any, Array]:
        q = octavo_jax.quantize(x, one_per_scaling, sizes, backend="jax-native", **arguments)
        return jax.tree.leaves(q), octavo_jax.dequantize(q, backend="jax-native")

    text = _text(run, jnp.ones((M, K), jnp.bfloat16), jnp.zeros(G, jnp.int32), platform=platform)
    target = f"@octavo_quantize_{one_per_scaling.scaling}("
    assert text.count(f"custom_call {target}") == 1
    assert text.count("custom_call @octavo_dequantize(") == 1
    (call,) = (line for line in text.splitlines() if f"custom_call {target}" in line)
    names = {"x", "plan"}
    if one_per_scaling.stochastic:
        names |= {"seed", "group_offset"}
    if one_per_scaling.scaling == "delayed":
        names |= {"encode_scales"}
    assert set(call.split('operands = "')[1].split('"')[0].split(",")) == names
    for attribute in (
        f"groups = {G} : i64",
        f"hadamard = {str(one_per_scaling.hadamard).lower()}",
        "amax_epsilon = 0.0",
    ):
        assert attribute in call, attribute
    assert "has_side_effect = true" not in text
    assert "callback" not in text


def test_native_layouts_are_attributes() -> None:
    """Layout numbers and the shapes that layouts.h gives them."""
    spec = QuantizerSpec(format="e4m3", scaling="block", power_of_two=True)
    request = Request(
        "quantize", "jax", "cpu", "bfloat16", "bfloat16", quantizer=spec, groups=G, layouts=("rows", "panels")
    )
    run = octavo_registry.plan(request, backend="jax-native").run
    text = _text(lambda x, s: jax.tree.leaves(run(x, s)), jnp.ones((M, K), jnp.bfloat16), jnp.zeros(G, jnp.int32))
    (call,) = (line for line in text.splitlines() if "custom_call @octavo_quantize_block(" in line)
    assert "row_layout = 1 : i64" in call
    assert "col_layout = 1 : i64" in call
    panels = (M + 127 * G) // 128
    for shape in (f"{M}x{K}xf8E4M3FN", f"1x{M}xf32", f"{panels}x{K}x128xf8E4M3FN", f"{panels}x{K}xf32"):
        assert f"tensor<{shape}>" in call, shape


def test_one_program_for_both_platforms() -> None:
    """A program for CPU and CUDA holds each call once: the same targets are registered for both."""
    spec = QuantizerSpec(format="e4m3", scaling="mxfp8")

    def run(x: Array, sizes: Array) -> Any:
        return jax.tree.leaves(octavo_jax.quantize(x, spec, sizes, backend="jax-native"))

    traced = jax.jit(run).trace(jnp.ones((M, K)), jnp.zeros(G, jnp.int32))
    text = traced.lower(lowering_platforms=("cpu", "cuda")).as_text()
    assert text.count("custom_call @octavo_quantize_mxfp8(") == 1


@pytest.mark.parametrize("kind", ["bf16", "block", "nvfp4"])
@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("platform", ["cuda", "cpu"])
def test_a_gemm_is_one_call_and_one_plan(kind: str, gemm: Any, platform: str) -> None:
    """Its attributes, its operands by name, and nothing that touches the sizes on the host."""
    recipe, n = octavo.recipe(kind), 48
    shapes = {"x": (M, K), "w": (G, n, K), "dy": (M, n)}
    request = Request(gemm, "jax", "cpu", "bfloat16", "float32", recipe=recipe.for_gemm(gemm))
    plan = octavo_registry.plan(request, backend="jax-native")
    order = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("x", "dy")}[gemm]
    sizes, arrays = jnp.zeros(G, jnp.int32), [jnp.ones(shapes[name], jnp.bfloat16) for name in order]

    def run(first: Array, second: Array, sizes: Array) -> Any:
        operands: list[Any] = [first, second]
        if recipe.quantizes(gemm):
            for i, name in enumerate(order):
                layouts = ("rows", "panels")
                wanted = Request(
                    "quantize", "jax", "cpu", "bfloat16", "bfloat16", quantizer=recipe.quantizer(name), layouts=layouts
                )
                quantize = octavo_registry.plan(wanted, backend="jax-native").run
                seed = 7 if wanted.quantizer.stochastic else None  # type: ignore[union-attr]
                operands[i] = quantize(operands[i], None if name == "w" else sizes, seed=seed, operand=name)
        return plan.run(*operands, sizes)

    text = _text(run, *arrays, sizes, platform=platform)
    (call,) = (line for line in text.splitlines() if "custom_call @octavo_gemm(" in line)
    names = {"left", "right", "plan"}
    if kind != "bf16":
        names |= {"left_scales", "right_scales"}
    if kind == "nvfp4":
        names |= {"left_global", "right_global"}
    assert set(call.split('operands = "')[1].split('"')[0].split(",")) == names
    number = {"fprop": 0, "dgrad": 1, "wgrad": 2}[gemm]
    hadamard, square = kind == "nvfp4" and gemm == "wgrad", kind != "bf16" and gemm != "wgrad"
    for attribute in (
        f"gemm = {number} : i64",
        f"rows = {M} : i64",
        f"n = {n} : i64",
        f"k = {K} : i64",
        f"groups = {G} : i64",
        f"quantized = {str(kind != 'bf16').lower()}",
        f"hadamard = {str(hadamard).lower()}",
        f"right_square = {str(square).lower()}",
        "accumulate = false",
        "fast_accumulation = false",
    ):
        assert attribute in call, attribute
    # y alone: XLA would make a y that a loop stacks twice, and writes a stacked dw straight to its place
    assert text.count("stablehlo.optimization_barrier") == (gemm == "fprop")
    assert "octavo_convert" not in text
    assert "callback" not in text
    assert "has_side_effect = true" not in text


def test_fast_accumulation_is_an_attribute_where_scales_allow_it() -> None:
    """Of the GEMMs that the recipe names; block scales are applied to promoted sums and leave nothing to leave out."""
    fast: Any = frozenset({"fprop"})
    x, kernel = jnp.ones((M, K), jnp.bfloat16), jnp.ones((G, K, 48), jnp.bfloat16)
    for recipe, expected in (
        (octavo.CurrentScaling(fast_accumulation=fast), ["true", "false", "false"]),
        (octavo.RowScaling(fast_accumulation=fast), ["true", "false", "false"]),
        (octavo.BlockScaling(fast_accumulation=fast), ["false"] * 3),
        (octavo.MXFP8(fast_accumulation=fast), ["false"] * 3),
    ):

        def loss(x: Array, kernel: Array, sizes: Array, recipe: octavo.Recipe = recipe) -> Array:
            y = octavo_jax.grouped_dense(x, kernel, sizes, recipe=recipe, backend="jax-native")
            return jnp.sum(jnp.tanh(y))

        text = _text(jax.grad(loss, (0, 1)), x, kernel, jnp.zeros(G, jnp.int32))
        calls = [line for line in text.splitlines() if "custom_call @octavo_gemm(" in line]
        found = {line.split("gemm = ")[1][0]: line.split("fast_accumulation = ")[1].split(",")[0] for line in calls}
        # Of a kernel that lies as [G, K, N] the kernels' dgrad (1) makes y.
        assert [found[number] for number in "102"] == expected, recipe.kind


@pytest.mark.skipif(not octavo_native.HAS_CUDA, reason="this build of octavo-native serves no CUDA device")
def test_a_room_is_an_attribute_of_every_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels are told how many multiprocessors are theirs, of a layer as a caller has it."""
    described = SimpleNamespace(platform="gpu", compute_capability="9.0", core_count=132, client=None)
    monkeypatch.setattr(device, "device_holding", lambda x: described)
    x, kernel = jnp.ones((M, K), jnp.bfloat16), jnp.ones((G, K, 48), jnp.bfloat16)
    for room, ctas in ((None, 0), (octavo_jax.Room(gemms=16), 116), (octavo_jax.Room(gemms=131), 1)):

        def loss(x: Array, kernel: Array, sizes: Array, room: octavo_jax.Room | None = room) -> Array:
            how: dict[str, Any] = {"recipe": octavo.MXFP8(), "backend": "jax-native", "room": room}
            return jnp.sum(jnp.tanh(octavo_jax.grouped_dense(x, kernel, sizes, **how)))

        text = _text(jax.grad(loss, (0, 1)), x, kernel, jnp.zeros(G, jnp.int32))
        calls = [line for line in text.splitlines() if "custom_call @octavo_gemm(" in line]
        assert len(calls) == 3
        assert all(f"ctas = {ctas} : i64" in line for line in calls)


@pytest.mark.parametrize("policy", ["plain", "save_quantized"])
def test_a_scan_of_remat_layers_for_cuda(policy: str) -> None:
    """Five layers forward and backward are two loops of our calls: typed FFI, nothing of the host, sizes into the plan
    alone, and remat's second quantization only where no policy saves the first (faults.md 36, 42)."""
    layers, recipe = 5, octavo.recipe("mxfp8")
    kernels, x, sizes = (
        jnp.ones((layers, G, K, K), jnp.bfloat16),
        jnp.ones((M, K), jnp.bfloat16),
        jnp.zeros(G, jnp.int32),
    )

    def layer(x: Array, kernel: Array, sizes: Array) -> Array:
        return jnp.tanh(octavo_jax.grouped_dense(x, kernel, sizes, recipe=recipe, backend="jax-native"))

    def loss(x: Array, kernels: Array, sizes: Array) -> Array:
        under = jax.checkpoint(layer, policy=save_quantized() if policy == "save_quantized" else None)
        return jnp.sum(jax.lax.scan(lambda x, kernel: (under(x, kernel, sizes), None), x, kernels)[0])

    text = _text(jax.grad(loss, (0, 1)), x, kernels, sizes)
    calls = [line for line in text.splitlines() if "stablehlo.custom_call @" in line]
    targets = [line.split("custom_call @")[1].split("(")[0] for line in calls]
    assert set(targets) == {"octavo_plan", "octavo_quantize_mxfp8", "octavo_gemm"}
    # x and the kernel forward, dy backward; plain remat makes both again, in the planes that the backward pass reads
    assert targets.count("octavo_quantize_mxfp8") == (3 if policy == "save_quantized" else 5)
    assert targets.count("octavo_gemm") == 4  # tanh wants y, so fprop runs again under either policy
    assert text.count("stablehlo.while") == 2
    for line in calls:
        # a dictionary: the typed FFI, whose handlers may say that CUDA graphs can record them; the old one has a string
        assert "backend_config = {" in line
        assert "has_side_effect = true" not in line
        workspace = "workspace" in line.split('results = "')[1].split('"')[0] if 'results = "' in line else False
        assert workspace <= octavo_native.HAS_CUDA  # a result, so that XLA owns it; CPU builds cannot tell its size
    plans = [line for line in calls if "@octavo_plan(" in line]
    assert all(f"(tensor<{G}xi32>) -> tensor" in line for line in plans)
    for word in ("callback", "infeed", "outfeed", "send", "recv", "_xla_host"):
        assert word not in text, word


INT32_END = 1 << 31


@pytest.mark.parametrize("name", ["fp8-block", "mxfp8", "nvfp4"])
def test_arrays_past_2_to_31_elements(name: str) -> None:
    """x and y of 2^32 elements, a kernel of 2^32: forward and backward lower for CUDA, and no dimension of any array,
    a workspace of 13 GB among them, is longer than int32 counts."""
    m, k, n, groups = 1 << 19, 1 << 13, 1 << 13, 64
    avals = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((m, k), (groups, k, n), (m, n))]
    recipe = octavo.recipe(name)

    def step(x: Array, kernel: Array, dy: Array, sizes: Array) -> Any:
        def layer(x: Array, kernel: Array) -> Array:
            y: Array = octavo_jax.grouped_dense(x, kernel, sizes, recipe=recipe, seed=3, backend="jax-native")
            return y

        y, pull = jax.vjp(layer, x, kernel)
        return y, pull(dy)

    text = _text(step, *avals, jax.ShapeDtypeStruct((groups,), jnp.int32))
    shapes = [tuple(map(int, found.split("x")[:-1])) for found in re.findall(r"tensor<((?:\d+x)+)[a-z]", text)]
    assert (m, k) in shapes
    assert max(length for shape in shapes for length in shape) < INT32_END
    assert max(map(math.prod, shapes)) > INT32_END


@pytest.mark.parametrize("needed", [0, 1, 1 << 20, (1 << 30) - 256, (1 << 30) - 255, 13_017_022_464, 1 << 45])
def test_a_workspace_holds_what_is_needed(needed: int) -> None:
    """From an address that is aligned to 256 bytes on; past a gigabyte in rows of a megabyte, the last one begun."""
    made = workspace_result(needed)
    if not needed:
        assert made == {}
        return
    shape = made["workspace"].shape
    assert needed + 256 <= math.prod(shape) < needed + 256 + (1 << 20) * (len(shape) - 1) + 1
    assert len(shape) == 1 + (needed + 256 > 1 << 30)
    assert max(shape) < INT32_END
