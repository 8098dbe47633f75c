"""fprop, dgrad, wgrad: every recipe within its bound, operands and results of any layout and strides, refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import native_calls as native
import numpy as np
import pytest
import torch
from gemm_layers import NATIVE, SHAPE, Layer, bound, draw_layer, request
from torch import Tensor

import octavo_registry
from octavo import MXFP8, NVFP4, BlockScaling, CurrentScaling, HighPrecision, Recipe
from octavo.grouped_tensor import PLAIN
from octavo.quantizer import Operand
from octavo.recipe_base import GEMMS, Gemm
from octavo_conformance.cards.variants import MORE_RECIPES, RECIPES
from octavo_conformance.problems.operands import RUN_ORDER
from octavo_registry.contract import TokenRows
from octavo_torch.plugin_api import Bounded
from octavo_torch_native import backend
from octavo_torch_native.arrays import operators as array_operators
from octavo_torch_native.backend import NativeBackend
from octavo_torch_native.gemm import gemm as gemms
from octavo_torch_native.gemm import launches
from octavo_torch_native.quantizers import operators

M, K, N, G = SHAPE
QUANTIZED = {**RECIPES, **MORE_RECIPES}
CASES = [(name, gemm) for name, recipe in QUANTIZED.items() for gemm in GEMMS if recipe.quantizes(gemm)]
HIGH = HighPrecision()


def run(gemm: Gemm, recipe: Recipe, operands: list[Any], sizes: Any, dtype: str = "bfloat16", **rest: Any) -> Tensor:
    made: Tensor = bound(gemm, recipe, dtype, **rest.pop("fields", {}))(*operands, sizes, **rest)
    return made


def same(a: Tensor, b: Tensor, what: object = "") -> None:
    assert a.dtype is b.dtype
    assert a.shape == b.shape
    wrong = a.contiguous().view(torch.uint8) != b.contiguous().view(torch.uint8)
    assert not wrong.any(), f"{what}: {int(wrong.sum())} bytes differ"


@pytest.mark.parametrize("case", CASES, ids=".".join)
def test_quantized_gemms_stay_within_the_bounds(case: tuple[str, Gemm], rng: np.random.Generator) -> None:
    """Native operands and plain ones, which are converted, give the same bits, in every output dtype; empty groups and
    tails are exact zeros (faults 1, 3, 6, 7, 8, 12, 14, 59)."""
    name, gemm = case
    recipe = QUANTIZED[name]
    refused = NativeBackend().refuses(request(gemm, recipe))
    if refused:
        pytest.skip(refused)
    for sizes in (None, [0, 128, 1, 0, 21]):
        layer = draw_layer(rng, recipe, sizes=sizes)
        ours, plain = layer.operands(gemm), layer.operands(gemm, plain=True)
        for out in ("bfloat16", "float32", "float16"):
            run_one = bound(gemm, recipe, out_dtype=out)
            y = run_one(*ours, layer.sizes)
            layer.check(gemm, y)
            same(run_one(*plain, layer.sizes), y, f"{out}, plain operands")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("gemm", GEMMS)
def test_unquantized_gemms_stay_within_the_bounds(gemm: Gemm, dtype: str, rng: np.random.Generator) -> None:
    """Every dtype of operands into every dtype of results; sides of one and of no multiple of anything."""
    for shape in (SHAPE, (70, 1, 33, 2), (70, 45, 1, 2), (64, 128, 128, 1)):
        layer = draw_layer(rng, HIGH, dtype, shape=shape)
        for out in ("bfloat16", "float32", "float16"):
            layer.check(gemm, run(gemm, HIGH, layer.operands(gemm), layer.sizes, dtype, fields={"out_dtype": out}))


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("gemm", GEMMS)
def test_no_rows(name: str, gemm: Gemm, rng: np.random.Generator) -> None:
    """M = 0, and rows that belong to no group: zeros of the right shape."""
    recipe = RECIPES[name]
    for rows in (0, 40):
        layer = draw_layer(rng, recipe, shape=(rows, 48, 32, 3), sizes=[0, 0, 0])
        layer.check(gemm, run(gemm, recipe, layer.operands(gemm), layer.sizes))


@pytest.mark.parametrize("name", ["bf16", "mxfp8", "nvfp4"])
def test_bias(name: str, rng: np.random.Generator) -> None:
    """In its own dtype, alone and times the row's scale, before the one rounding; scales past the sum are not read."""
    recipe = RECIPES[name]
    for dtype in ("float32", "bfloat16", "float16"):
        layer = draw_layer(rng, recipe)
        bias = torch.from_numpy(layer.problem.bias.astype(np.float32)).to(getattr(torch, dtype))
        layer.problem = replace(layer.problem, bias=bias.float().numpy())
        operands = layer.operands("fprop")
        layer.check("fprop", run("fprop", recipe, operands, layer.sizes, bias=bias), bias=True)
        scales = torch.randn(M).to(getattr(torch, dtype))
        scales[layer.problem.total :] = torch.nan
        y = run("fprop", recipe, operands, layer.sizes, bias=bias, bias_scales=scales)
        layer.check("fprop", y, bias=True, bias_scales=scales.float().numpy())
        wide = torch.full((G, 2 * N), torch.nan, dtype=bias.dtype)
        wide[:, :N] = bias
        same(run("fprop", recipe, operands, layer.sizes, bias=wide[:, :N], bias_scales=scales), y, "strided bias")


def buffers(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Tensor]:
    """Results of every kind of strides, in memory full of NaN."""
    *lead, rows, columns = shape
    nan = {"fill_value": torch.nan, "dtype": dtype}
    made = {
        "contiguous": torch.full(shape, **nan),
        "rows apart": torch.full((*lead, rows, 2 * columns), **nan)[..., 8 : 8 + columns],
        "odd rows": torch.full((*lead, rows, columns + 3), **nan)[..., 1 : 1 + columns],
        "transposed": torch.full((*lead, columns, rows), **nan).transpose(-1, -2),
        "every second": torch.full((*lead, rows, 2 * columns), **nan)[..., ::2],
    }
    if lead:
        made["matrices apart"] = torch.full((2 * lead[0], rows, columns), **nan)[::2]
        made["matrices side by side"] = torch.full((rows, lead[0], columns), **nan).transpose(0, 1)
    return made


@pytest.mark.parametrize("name", ["bf16", "block"])
@pytest.mark.parametrize("gemm", GEMMS)
def test_out_of_any_strides(gemm: Gemm, name: str, rng: np.random.Generator) -> None:
    """The caller's memory gets the result, nothing beside it is written, and it comes back (faults 3, 8, 58)."""
    recipe = RECIPES[name]
    layer = draw_layer(rng, recipe)
    operands = layer.operands(gemm)
    for dtype in (torch.bfloat16, torch.float32):
        expected = run(gemm, recipe, operands, layer.sizes, fields={"out_dtype": str(dtype).removeprefix("torch.")})
        for what, out in buffers(layer.shape(gemm), dtype).items():
            assert run(gemm, recipe, operands, layer.sizes, out=out) is out
            same(out, expected, what)
            whole = out._base if out._base is not None else out
            assert int(whole.isnan().sum()) == whole.numel() - out.numel(), what


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", RECIPES)
def test_wgrad_accumulates(name: str, dtype: torch.dtype, rng: np.random.Generator) -> None:
    """out + dw in fp32, rounded once, in any strides; a group without rows keeps its bits, NaN and -0 included."""
    recipe = RECIPES[name]
    layer = draw_layer(rng, recipe, sizes=[40, 0, 33, 0, 50])
    operands = layer.operands("wgrad")
    exact = run("wgrad", recipe, operands, layer.sizes, fields={"out_dtype": "float32"})
    start = torch.randn(G, N, K).to(dtype)
    start[1], start[3] = torch.nan, -0.0
    expected = (start.float() + exact).to(dtype)
    expected[1], expected[3] = start[1], start[3]
    for what, out in buffers((G, N, K), dtype).items():
        out.copy_(start)
        assert run("wgrad", recipe, operands, layer.sizes, out=out, accumulate=True) is out
        same(out, expected, what)
    again = torch.full_like(start, torch.nan)
    run("wgrad", recipe, operands, layer.sizes, out=again)
    same(again, run("wgrad", recipe, operands, layer.sizes, fields={"out_dtype": str(dtype).removeprefix("torch.")}))


@pytest.mark.parametrize("gemm", GEMMS)
def test_strided_operands(gemm: Gemm, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sliced, transposed, expanded and oddly placed tensors give the bits of contiguous ones (faults 44, 45); rows that
    stand whole 16-byte pieces apart are read where they are."""
    layer = draw_layer(rng, HIGH)
    first, second = layer.operands(gemm)
    expected = run(gemm, HIGH, [first, second], layer.sizes)

    def views(value: Tensor) -> dict[str, Tensor]:
        wide = torch.full((*value.shape[:-1], 2 * value.shape[-1]), torch.nan, dtype=value.dtype)
        wide[..., 16 : 16 + value.shape[-1]] = value
        odd = torch.full((*value.shape[:-1], value.shape[-1] + 3), torch.nan, dtype=value.dtype)
        odd[..., 1:-2] = value
        return {
            "slice": wide[..., 16 : 16 + value.shape[-1]],
            "odd": odd[..., 1:-2],
            "transposed": value.transpose(-1, -2).contiguous().transpose(-1, -2),
        }

    for what, view in views(first).items():
        same(run(gemm, HIGH, [view, second], layer.sizes), expected, f"first operand, {what}")
    for what, view in views(second).items():
        same(run(gemm, HIGH, [first, view], layer.sizes), expected, f"second operand, {what}")
    spread = torch.full((2 * G, N, K), torch.nan, dtype=torch.bfloat16)[::2]
    if gemm != "wgrad":
        spread.copy_(second)
        same(run(gemm, HIGH, [first, spread], layer.sizes), expected, "matrices apart")
    row = first[:1].expand(first.shape)
    cloned = row.clone(memory_format=torch.contiguous_format)
    sizes = torch.tensor([M, 0, 0, 0, 0])
    safe = second.nan_to_num()
    same(run(gemm, HIGH, [row, safe], sizes), run(gemm, HIGH, [cloned, safe], sizes), "expanded")

    plan = native.plan(layer.sizes, M)
    slices = [views(first)["slice"], views(second)["slice"]]
    bound_run = bound(gemm, HIGH)
    monkeypatch.setattr(Tensor, "contiguous", lambda *_, **__: pytest.fail("a copy was made"))
    monkeypatch.setattr(Tensor, "clone", lambda *_, **__: pytest.fail("a copy was made"))
    made = bound_run(*slices, plan)
    monkeypatch.undo()
    same(made, expected)


@pytest.mark.parametrize("gemm", ["dgrad", "wgrad"])
def test_operands_of_two_dtypes(gemm: Gemm, rng: np.random.Generator) -> None:
    """A recipe with an output_dtype has dy in another dtype than x and w: both are held exactly."""
    recipe = HighPrecision(output_dtype="float32")
    layer = draw_layer(rng, recipe)
    operands = [value.float() if name == "dy" else value for name, value in zip(RUN_ORDER[gemm], layer.operands(gemm))]  # noqa: B905
    made = run(gemm, recipe, operands, layer.sizes, "float32")
    layer.check(gemm, made)
    same(made, run(gemm, recipe, [value.float() for value in operands], layer.sizes, "float32"))


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("gemm", GEMMS)
def test_one_index_for_a_step(gemm: Gemm, name: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GroupIndex in the sizes' place: the same bits, and no call makes one of its own."""
    recipe = RECIPES[name]
    layer = draw_layer(rng, recipe)
    operands = layer.operands(gemm)
    expected = run(gemm, recipe, operands, layer.sizes)
    plan = native.plan(layer.sizes, M)
    run_one = bound(gemm, recipe)
    monkeypatch.setattr(array_operators, "plan", lambda *_: pytest.fail("an index was computed"))
    same(run_one(*operands, plan), expected)
    monkeypatch.undo()
    with pytest.raises(ValueError, match=f"a GroupIndex of {M + 1} rows on cpu and the operand has {M} rows"):
        run_one(*operands, native.plan(layer.sizes, M + 1))


@pytest.mark.parametrize("gemm", GEMMS)
def test_sizes_are_checked(gemm: Gemm, rng: np.random.Generator) -> None:
    """Sizes past the rows or below zero raise; as many as groups are needed (faults 61, 62)."""
    layer = draw_layer(rng, HIGH)
    operands = layer.operands(gemm)
    for sizes in ([M, 1, 0, 0, 0], [3, -1, 0, 0, 0]):
        with pytest.raises(ValueError, match="group_sizes"):
            run(gemm, HIGH, operands, torch.tensor(sizes))
    if gemm != "wgrad":
        with pytest.raises(ValueError, match="there are 4 group sizes"):
            run(gemm, HIGH, operands, torch.tensor([1, 2, 3, 4]))


def test_what_does_not_fit(rng: np.random.Generator) -> None:
    """Each sentence has what was given and what is needed."""
    layer, other = draw_layer(rng, MXFP8()), draw_layer(rng, BlockScaling())
    x, w, sizes = layer.native("x"), layer.native("w"), layer.sizes
    dy = layer.native("dy")
    fprop, wgrad = bound("fprop", MXFP8()), bound("wgrad", MXFP8())
    with pytest.raises(ValueError, match="x is quantized in mxfp8 and w in block; quantize both in one recipe"):
        fprop(x, other.native("w"), sizes)
    with pytest.raises(
        ValueError, match="x is a GroupedTensor and w a Tensor; give two GroupedTensors, or two tensors"
    ):
        fprop(x, layer.array("w"), sizes)
    with pytest.raises(ValueError, match=rf"x has shape \[{M}, {K}\], w \[{G}, {K}, {N}\] and there are 5 group sizes"):
        fprop(layer.array("x"), layer.array("w").transpose(1, 2), sizes)
    with pytest.raises(ValueError, match=rf"dy has shape \[{M - 1}, {N}\], x \[{M}, {K}\]"):
        wgrad(layer.array("x"), layer.array("dy")[1:], sizes)
    with pytest.raises(ValueError, match=r"out has shape \[3, 3\] on cpu; give \[150, 80\] on cpu, in any strides"):
        fprop(x, w, sizes, out=torch.empty(3, 3))
    with pytest.raises(ValueError, match="out has dtype int32; give bfloat16, float16 or float32"):
        fprop(x, w, sizes, out=torch.empty(M, N, dtype=torch.int32))
    with pytest.raises(ValueError, match="out has dtype float64; give"):
        wgrad(layer.array("x"), layer.array("dy"), sizes, out=torch.empty(G, N, K, dtype=torch.float64))
    with pytest.raises(ValueError, match="x has dtype int32; give bfloat16"):
        fprop(layer.array("x").int(), layer.array("w").int(), sizes)
    fours, plain = draw_layer(rng, NVFP4()), draw_layer(rng, NVFP4(hadamard=False))
    with pytest.raises(ValueError, match="dy has hadamard=True and x hadamard=False; quantize both alike"):
        bound("wgrad", NVFP4())(plain.native("x"), fours.native("dy"), sizes)
    square = native.quantize(layer.array("x"), BlockScaling().quantizer("w"), sizes).codes  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="x is quantized in square blocks, which the GEMMs read of w alone"):
        bound("fprop", BlockScaling())(square, other.native("w"), sizes)
    only_rows = native.quantize(layer.array("x"), x.spec.quantizer.model_copy(update={"orientation": "rowwise"}), sizes)
    with pytest.raises(ValueError, match="holds rowwise data only"):
        wgrad(only_rows.codes, dy, sizes)


def test_matrices_are_no_rows(rng: np.random.Generator) -> None:
    """Codes of one matrix [1, M, K] in the place of x [M, K] are refused, though there is one group: of codes, only
    those of `TokenRows` are a matrix."""
    layer = draw_layer(rng, BlockScaling(), shape=(40, 48, 32, 1), sizes=[33])
    x = native.quantize(layer.array("x")[None], BlockScaling().quantizer("x")).codes  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"x has shape \[1, 40, 48\], w \[1, 32, 48\]"):
        bound("fprop", BlockScaling())(x, layer.native("w"), layer.sizes)


def test_codes_of_tokens_that_do_not_fit(rng: np.random.Generator) -> None:
    """What a product cannot gather has a sentence: codes of another scaling, of a weight gradient, in another layout,
    and of rows in groups."""
    places = torch.arange(M), torch.arange(M)[:, None], torch.ones(M, 1, dtype=torch.bool)
    block, mx = draw_layer(rng, BlockScaling()), draw_layer(rng, MXFP8())

    def tokens(layer: Layer, operand: Operand, layouts: tuple[str, str] = (PLAIN, PLAIN)) -> TokenRows[Tensor]:
        spec = layer.recipe.quantizer(operand)
        assert spec is not None
        return TokenRows(native.quantize(layer.array(operand)[None], spec, layouts=layouts).codes, *places)

    with pytest.raises(ValueError, match="x is tokens quantized in mxfp8, whose codes are not those of rows in fprop"):
        bound("fprop", MXFP8())(tokens(mx, "x"), mx.native("w"), mx.sizes)
    with pytest.raises(ValueError, match="dy is tokens quantized in block, whose codes are not those of rows in wgrad"):
        bound("wgrad", BlockScaling())(block.native("x"), tokens(block, "dy"), block.sizes)
    fprop, w = bound("fprop", BlockScaling()), block.native("w")
    matrix = rf"quantize them as one matrix \[1, T, {K}\] in plain"
    with pytest.raises(ValueError, match=rf"x is tokens \[1, {M}, {K}\] quantized in the layout rows; {matrix}"):
        fprop(tokens(block, "x", ("rows", "panels")), w, block.sizes)
    with pytest.raises(ValueError, match=rf"x is tokens \[{M}, {K}\] quantized in the layout plain; {matrix}"):
        fprop(TokenRows(block.plain("x"), *places), w, block.sizes)


def test_fast_accumulation_changes_no_bit_here(rng: np.random.Generator) -> None:
    """A CPU sums in fp32 whatever the recipe allows; recipes with blocks may allow it, too."""
    for recipe in (CurrentScaling(fast_accumulation=frozenset(GEMMS)), MXFP8(fast_accumulation=frozenset(GEMMS))):
        layer = draw_layer(rng, recipe)
        slow = type(recipe)()
        for gemm in GEMMS:
            operands = layer.operands(gemm)
            same(run(gemm, recipe, operands, layer.sizes), run(gemm, slow, operands, layer.sizes))


@pytest.mark.parametrize("gemm", GEMMS)
def test_layouts_of_the_kernels(gemm: Gemm) -> None:
    """What the registry is told to have quantized is what is read without a conversion."""
    plan = octavo_registry.plan(request(gemm, MXFP8()), backend="torch-native")
    assert tuple(plan.layouts[name] for name in RUN_ORDER[gemm]) == NATIVE[gemm]
    assert not octavo_registry.plan(request(gemm, HIGH), backend="torch-native").layouts


def test_native_operands_are_not_converted(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversion costs more than some GEMMs; none happens on the way of a layer."""
    monkeypatch.setattr(operators, "convert", lambda *_: pytest.fail("an operand was converted"))
    for name, recipe in RECIPES.items():
        layer = draw_layer(rng, recipe)
        for gemm in GEMMS:
            run(gemm, recipe, layer.operands(gemm), layer.sizes), name


def test_many_shapes_are_not_all_kept(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept for a shape or a pair of specs is bounded (fault 52)."""
    monkeypatch.setattr(Bounded, "limit", 16)
    recipe, w = MXFP8(), torch.randn(1, 16, 16)
    codes = native.quantize(w, recipe.quantizer("w")).codes  # type: ignore[arg-type]
    fprop = gemms.Fprop("float16")
    for rows in range(1, 40):
        x, sizes = torch.randn(rows, 16), torch.tensor([rows])
        fprop(x, w, sizes)
        fprop(native.quantize(x, recipe.quantizer("x")).codes, codes, sizes)  # type: ignore[arg-type]
    assert 0 < len(fprop._pairs) <= 16
    texts = [*fprop._texts.values(), *(pair.text for pair in fprop._pairs.values())]
    assert all(0 < len(launches.gemm_launch_of(text)._shapes) <= 16 for text in texts)


@pytest.mark.parametrize("gemm", GEMMS)
def test_a_limit_is_offered_where_there_are_multiprocessors(gemm: Gemm, rng: np.random.Generator) -> None:
    """Of CUDA devices, and it reaches the kernels in every launch; the CPU's take it, and have the same bits."""
    recipe = BlockScaling()
    here: Any = octavo_registry.plan(request(gemm, recipe), backend="torch-native").bound
    there: Any = request(gemm, recipe, device="cuda", arch=(9, 0))
    assert here.limited is None
    assert backend._bind_gemm(there).limited is not None
    for quantized in (recipe, HIGH):
        layer = draw_layer(rng, quantized)
        free = bound(gemm, quantized)
        limited = free.limited(3)
        for _ in range(2):
            same(limited(*layer.operands(gemm), layer.sizes), free(*layer.operands(gemm), layer.sizes))
        texts = [*limited._texts.values(), *(pair.text for pair in limited._pairs.values())]
        assert [launches.gemm_launch_of(text)._ctas for text in texts] == [3]
