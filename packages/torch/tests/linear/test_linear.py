"""grouped_linear: values within the derived bounds, exact tails and empty groups, gradients where they are wanted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from float64_sums import assert_sums
from torch import Tensor

import octavo_numerics
from octavo import PRESETS, DelayedScaling, HighPrecision, Recipe
from octavo_torch import DelayedState, GroupedTensor, dequantize, grouped_linear, grouped_mm, quantize, quantize_weight

SIZES = [33, 0, 1, 70, 16]
M, K, N, G = 140, 160, 144, len(SIZES)
USED = sum(SIZES)


def bounds() -> list[tuple[int, slice]]:
    """Rows of each group that has some."""
    ends = np.cumsum(SIZES)
    return [
        (g, slice(int(end) - size, int(end))) for g, (end, size) in enumerate(zip(ends, SIZES, strict=True)) if size
    ]


def state_for(recipe: Recipe) -> DelayedState | None:
    return DelayedState.create(recipe, G) if recipe.stateful else None  # type: ignore[arg-type]


def operand(value: Tensor, recipe: Recipe, name: str, gemm: str, direction: str, sizes: list[int] | None) -> Tensor:
    """What a GEMM multiplies: dequantized codes, or the tensor itself where the slot is high precision."""
    spec = recipe.quantizer(name)  # type: ignore[arg-type]
    if spec is None or not recipe.quantizes(gemm):  # type: ignore[arg-type]
        return value.detach().float()
    scale = torch.ones(G) if recipe.stateful else None
    q = quantize(value.detach(), spec, sizes, seed=7, scale=scale)
    return dequantize(q, direction)  # type: ignore[arg-type]


def check(actual: Tensor, a: Tensor, b: Tensor, recipe: Recipe, gemm: str, zero_mean: bool = True) -> None:
    """T1 and T2 of docs/numerics on one group."""
    name = str(actual.dtype).removeprefix("torch.")
    bound = octavo_numerics.error_bound(recipe, a.shape[1], gemm=gemm, out_dtype=name)  # type: ignore[arg-type]
    report = bound.check(actual.detach().double().numpy(), a.double().numpy(), b.double().numpy(), zero_mean=zero_mean)
    assert report.passed, f"{gemm}: {report.describe()}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", PRESETS)
def test_gemms_stay_within_the_bounds(name: str, dtype: torch.dtype, rng: np.random.Generator) -> None:
    """y, dx and dw of every recipe against float64 on the same dequantized operands; NaN tails change nothing.

    faults.md 1, 2, 3, 6, 7, 8, 9, 10, 11, 12, 13, 14, 59.
    """
    recipe = PRESETS[name]
    x = torch.randn(M, K).to(dtype)
    x[USED:] = torch.nan
    w = torch.randn(G, N, K).to(dtype).requires_grad_()
    dy = torch.randn(M, N).to(dtype)
    dy[USED:] = torch.nan
    x.requires_grad_()
    y = grouped_linear(x, w, SIZES, recipe=recipe, seed=7, state=state_for(recipe))
    y.backward(dy)
    assert x.grad is not None
    assert w.grad is not None
    assert torch.equal(y[USED:], torch.zeros(M - USED, N, dtype=dtype))
    assert torch.equal(x.grad[USED:], torch.zeros(M - USED, K, dtype=dtype))
    assert torch.equal(w.grad[1], torch.zeros(N, K, dtype=dtype))
    ops = {
        "x": operand(x, recipe, "x", "fprop", "rowwise", SIZES),
        "w": operand(w, recipe, "w", "fprop", "rowwise", None),
        "dy": operand(dy, recipe, "dy", "dgrad", "rowwise", SIZES),
        "w column": operand(w, recipe, "w", "dgrad", "columnwise", None),
        "x column": operand(x, recipe, "x", "wgrad", "columnwise", SIZES),
        "dy column": operand(dy, recipe, "dy", "wgrad", "columnwise", SIZES),
    }
    spec = recipe.quantizer("x")
    padded = spec is not None and spec.hadamard and recipe.quantizes("wgrad")
    start = 0
    for g, rows in bounds():
        check(y[rows], ops["x"][rows], ops["w"][g], recipe, "fprop")
        check(x.grad[rows], ops["dy"][rows], ops["w column"][g].T, recipe, "dgrad")
        column = slice(start, start + -(-SIZES[g] // 16) * 16) if padded else rows
        start = column.stop
        # few products of codes have few distinct values, which all round alike; and a run of 16 that holds one real row
        # has 16 equal products after the transform: no independent terms
        many = SIZES[g] >= 64 and not padded
        check(w.grad[g], ops["dy column"][column].T, ops["x column"][column].T, recipe, "wgrad", zero_mean=many)


def test_bias_and_its_scales(rng: np.random.Generator) -> None:
    """y gains s[r] * b[g]; db and ds are its exact derivatives up to fp32 rounding; NaN in the tail stays out."""
    x, w = torch.randn(M, K), torch.randn(G, N, K)
    b, s = torch.randn(G, N, requires_grad=True), torch.randn(M)
    s[USED:] = torch.nan
    s.requires_grad_()
    dy = torch.randn(M, N)
    dy[USED:] = torch.nan
    y = grouped_linear(x, w, SIZES, recipe=None, bias=b, bias_scales=s)
    y.backward(dy)
    assert b.grad is not None
    assert s.grad is not None
    assert torch.equal(s.grad[USED:], torch.zeros(M - USED))
    assert torch.equal(b.grad[1], torch.zeros(N))
    for g, rows in bounds():
        scale, bias = s[rows, None].detach(), b[g].detach()
        # one more product in each sum
        check(y[rows], torch.cat([x[rows], scale], 1), torch.cat([w[g], bias[:, None]], 1), HighPrecision(), "fprop")
        assert_sums(b.grad[g], (scale.double() * dy[rows].double()).T)
        assert_sums(s.grad[rows], dy[rows].double() * bias.double())


@pytest.mark.parametrize("wanted", ["x", "w", "b"])
def test_only_what_is_asked_for(wanted: str, rng: np.random.Generator) -> None:
    """No gradient, no saved activation and no column codes for what needs none."""
    recipe = PRESETS["mxfp8"]
    x, w, b = torch.randn(M, K), torch.randn(G, N, K), torch.randn(G, N)
    leaves = {"x": x, "w": w, "b": b}
    leaves[wanted].requires_grad_()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        y = grouped_linear(x, w, SIZES, recipe=recipe, bias=b, backend="torch-reference")
    shapes = {tuple(t.shape) for t in saved}
    assert ((M, K) in shapes) == (wanted == "w")
    assert ((G, N, K) in shapes) == (wanted == "x")
    y.sum().backward()
    assert [name for name, leaf in leaves.items() if leaf.grad is not None] == [wanted]


def test_saved_activation_is_one_byte_an_element(rng: np.random.Generator) -> None:
    """Backward holds x's column codes and scales, not x: 1 + 1/32 bytes an element in MXFP8, plus partial blocks."""
    x, w = (
        torch.randn(256, 128, dtype=torch.bfloat16),
        torch.randn(2, 64, 128, dtype=torch.bfloat16, requires_grad=True),
    )
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        grouped_linear(x, w, [128, 128], recipe=PRESETS["mxfp8"], backend="torch-reference")
    held = sum(t.numel() * t.element_size() for t in saved if t.dtype is not torch.int64)
    assert held <= 256 * 128 + (256 // 32 + 2) * 128


def test_bits_do_not_depend_on_where_a_group_begins(rng: np.random.Generator) -> None:
    """A group of few fp32 rows, whose bytes no power of two divides, has those that it has alone: experts over ranks
    stand at other places than in one process, and BLAS sums what begins inside of 16 bytes in another order."""
    features, sizes = 33, [1, 2, 3, 1, 3, 2, 2, 1]
    x, w = torch.randn(sum(sizes), features), torch.randn(len(sizes), 35, features)
    dy = torch.randn(sum(sizes), 35)

    def run(x: Tensor, w: Tensor, dy: Tensor, sizes: list[int]) -> list[Tensor]:
        leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
        y = grouped_linear(*leaves, sizes, recipe=None, backend="torch-reference")
        return [y, *torch.autograd.grad(y, leaves, dy.clone())]

    *of_rows, dw = run(x, w, dy, sizes)
    for group, rows in enumerate(torch.arange(sum(sizes)).split(sizes)):
        alone = run(x[rows], w[[group]], dy[rows], [sizes[group]])
        for ours, theirs in zip([*(value[rows] for value in of_rows), dw[[group]]], alone, strict=True):
            assert torch.equal(ours, theirs), group


@pytest.mark.parametrize("name", ["bf16", "fp8-block", "mxfp8", "nvfp4"])
def test_strided_inputs_and_gradients(name: str, rng: np.random.Generator) -> None:
    """Transposed and sliced operands, and the stride-0 gradient of `sum` (faults.md 44, 45)."""
    recipe = PRESETS[name]
    x = torch.randn(K, M).T.requires_grad_()
    w = torch.randn(G, N, 2 * K)[:, :, ::2].requires_grad_()

    def grads(x: Tensor, w: Tensor, dy: Tensor | None) -> list[Tensor]:
        y = grouped_linear(x, w, SIZES, recipe=recipe, seed=1)
        return [y, *torch.autograd.grad(y.sum() if dy is None else y, (x, w), dy)]

    straight = x.detach().contiguous().requires_grad_(), w.detach().contiguous().requires_grad_()
    for dy in (None, torch.randn(N, M).T):
        twin = torch.ones(M, N) if dy is None else dy.contiguous()
        for ours, theirs in zip(grads(x, w, dy), grads(*straight, twin), strict=True):
            assert torch.equal(ours, theirs)


def test_quantized_weight_serves_microbatches(rng: np.random.Generator) -> None:
    """The same bits as quantizing in each call, gradients reach the weight; a stale or foreign one is refused
    (faults.md 37)."""
    recipe = PRESETS["fp8-block"]
    w = torch.randn(G, N, K, requires_grad=True)
    handle = quantize_weight(w, recipe)
    for _ in range(2):
        x = torch.randn(M, K, requires_grad=True)
        y, z = grouped_linear(x, handle, SIZES, recipe=recipe), grouped_linear(x, w, SIZES, recipe=recipe)
        assert torch.equal(y, z)
        for ours, theirs in zip(
            torch.autograd.grad(y.sum(), (x, w)), torch.autograd.grad(z.sum(), (x, w)), strict=True
        ):
            assert torch.equal(ours, theirs)
    with pytest.raises(ValueError, match="quantized for recipe block"):
        grouped_linear(x, handle, SIZES, recipe=PRESETS["mxfp8"])
    with torch.no_grad():
        w.add_(1.0)
    with pytest.raises(ValueError, match="changed in place"):
        grouped_linear(x, handle, SIZES, recipe=recipe)


def test_out_and_grad_input_buffers(rng: np.random.Generator) -> None:
    """Results land in the caller's buffers, with the same bits."""
    x, w = torch.randn(M, K, requires_grad=True), torch.randn(G, N, K)
    out, grad_input = torch.full((M, N), torch.nan), torch.full((M, K), torch.nan)
    y = grouped_linear(x, w, SIZES, recipe=PRESETS["mxfp8"], out=out, grad_input=grad_input)
    dy = torch.randn(M, N)
    y.backward(dy)
    assert y.data_ptr() == out.data_ptr()
    z = grouped_linear(x, w, SIZES, recipe=PRESETS["mxfp8"])
    assert torch.equal(y, z)
    assert torch.equal(grad_input, torch.autograd.grad(z, x, dy)[0])


@pytest.mark.parametrize("recipe", [None, *PRESETS.values()])
def test_no_second_derivative(recipe: Recipe | None) -> None:
    """Every way to a second derivative is refused with a sentence; none drops a term in silence.

    autograd.grad and backward(inputs=...) run only the nodes that lead to the inputs that are asked for.
    """
    x, w = torch.randn(4, 16), torch.randn(2, 8, 16, requires_grad=True)
    seed = 1 if recipe is not None and recipe.stochastic else None

    def f(v: torch.Tensor) -> torch.Tensor:
        state = DelayedState.create(recipe, 2) if isinstance(recipe, DelayedScaling) else None
        return grouped_linear(v, w, [2, 2], recipe=recipe, seed=seed, state=state).square().sum()

    refused = pytest.raises(NotImplementedError, match=r"no second derivative.* products of a recipe in high precision")
    functional = torch.autograd.functional
    with refused:
        functional.hvp(f, x, torch.ones_like(x))  # type: ignore[no-untyped-call]
    with refused:
        functional.hessian(f, x)  # type: ignore[no-untyped-call]
    leaf = x.clone().requires_grad_()
    for rows in (leaf, leaf * 1.0):
        with refused:  # a path past the layer hid that the layer's own term was missing
            (dx,) = torch.autograd.grad(f(rows) + leaf.pow(3).sum(), leaf, create_graph=True)
            torch.autograd.grad(dx.square().sum(), leaf)
        with refused:
            (dw,) = torch.autograd.grad(f(rows), w, create_graph=True)
            (dw.square().sum() + w.sum()).backward(inputs=[w])
        with refused:
            f(rows).backward(create_graph=True)


def test_a_refused_backward_has_done_nothing() -> None:
    """Whoever catches the refusal and calls backward again finds main_grad and the amax history as they were."""
    recipe = DelayedScaling(history=2)
    x, w = torch.randn(4, 16, requires_grad=True), torch.randn(2, 8, 16, requires_grad=True)
    state, main_grad = DelayedState.create(recipe, 2), torch.randn(2, 8, 16)
    w.main_grad = main_grad  # type: ignore[attr-defined]
    y = grouped_linear(x, w, [2, 2], recipe=recipe, state=state, main_grad="accumulate")
    before = main_grad.clone(), state.history.clone()
    with pytest.raises(NotImplementedError, match="no second derivative"):
        y.sum().backward(create_graph=True)
    assert torch.equal(main_grad, before[0])
    assert torch.equal(state.history, before[1])
    assert x.grad is None


@pytest.mark.parametrize("sizes", [np.array([2, 1], np.int32), (2, 1), torch.tensor([2, 1], dtype=torch.int32)])
def test_sizes_of_every_kind(sizes: object) -> None:
    """Sequences, numpy and int32 tensors are taken."""
    x, w = torch.randn(4, 8), torch.randn(2, 6, 8)
    assert torch.equal(
        grouped_linear(x, w, sizes, recipe=None), grouped_linear(x, w, torch.tensor([2, 1]), recipe=None)
    )


@pytest.mark.parametrize("layout", ["NK", "KN"])
def test_grouped_mm_is_torchs_convention(layout: str, rng: np.random.Generator) -> None:
    """Cumulative ends, b [G, K, N] of any strides, one rounding to out_dtype."""
    a = torch.randn(M, K, dtype=torch.bfloat16)
    w = torch.randn(G, N, K, dtype=torch.bfloat16)
    b = w.transpose(1, 2) if layout == "NK" else w.transpose(1, 2).contiguous()
    offs = torch.tensor(SIZES).cumsum(0).to(torch.int32)
    assert torch.equal(grouped_mm(a, b, offs), grouped_linear(a, w, SIZES, recipe=HighPrecision()))
    wide = grouped_mm(a, b, offs, recipe=PRESETS["mxfp8"], out_dtype=torch.float32)
    assert wide.dtype is torch.float32
    narrow = grouped_linear(a, w, SIZES, recipe=PRESETS["mxfp8"])
    assert torch.equal(wide.to(torch.bfloat16), narrow)
    assert not torch.equal(wide, narrow.float())


def test_wgrad_accumulates_and_leaves_empty_groups_alone(rng: np.random.Generator) -> None:
    """Bound.run of wgrad: out += dw, and an empty group's accumulator keeps its bits, a NaN and a -0 included."""
    import octavo_registry

    request = octavo_registry.Request(
        op="wgrad", framework="torch", device="cpu", in_dtype="float32", out_dtype="float32", recipe=HighPrecision()
    )
    run = octavo_registry.plan(request, backend="torch-reference").run
    x, dy, sizes = torch.randn(M, K), torch.randn(M, N), torch.tensor(SIZES)
    dw = run(x, dy, sizes)
    out = torch.randn(G, N, K)
    out[1, 0, 0], out[1, 0, 1] = torch.nan, -0.0
    before = out.clone()
    assert run(x, dy, sizes, out=out, accumulate=True) is out
    assert torch.equal(out[1].view(torch.int32), before[1].view(torch.int32))
    assert torch.equal(out[0], before[0] + dw[0])
    assert torch.equal(run(x, dy, sizes, out=out), dw)


def test_grouped_tensor_is_a_pytree_and_copies(rng: np.random.Generator) -> None:
    """tree_map, deepcopy and pickle-free saving see its planes (faults.md 50: codes verbatim)."""
    import copy

    from torch.utils import _pytree as pytree

    q = quantize(torch.randn(40, 64), PRESETS["nvfp4"].quantizer("x"), [10, 20])  # type: ignore[arg-type]
    twin = copy.deepcopy(q)
    mapped = pytree.tree_map(torch.clone, q)
    for other in (twin, mapped):
        assert isinstance(other, GroupedTensor)
        assert other.spec == q.spec
        assert torch.equal(other.rowwise, q.rowwise)
        assert other.rowwise.data_ptr() != q.rowwise.data_ptr()
    text = pytree.treespec_dumps(pytree.tree_structure(q))
    assert pytree.treespec_loads(text) == pytree.tree_structure(q)
    assert q.nbytes() > 0
    assert "nvfp4" in repr(q)


@pytest.mark.parametrize("lead", [(2, 70), (140,), (5, 4, 7), ()], ids=str)
def test_leading_axes(lead: tuple[int, ...], rng: np.random.Generator) -> None:
    """x [..., K], bias_scales [...] and the caller's buffers: the bits of the rows [M, K], in x's axes; K alone is one
    row."""
    rows = int(np.prod(lead))
    sizes = SIZES if rows == M else [0, 1, 0, 0, 0]
    w, b = torch.randn(G, N, K).bfloat16().requires_grad_(), torch.randn(G, N).requires_grad_()
    x, scales = torch.randn(rows, K).bfloat16(), torch.rand(rows)
    made = []
    for axes in ((rows,), lead):
        w.grad = b.grad = None
        leaf, scale = x.reshape(*axes, K).requires_grad_(), scales.reshape(axes).requires_grad_()
        # rows apart, as a slice of wider ones
        out, grad_input = torch.empty(*axes, 2 * N).bfloat16()[..., :N], torch.empty(*axes, K).bfloat16()
        y = grouped_linear(
            leaf, w, sizes, recipe=PRESETS["mxfp8"], bias=b, bias_scales=scale, out=out, grad_input=grad_input
        )
        y.backward(torch.ones_like(y))
        assert (y.shape, y.data_ptr()) == ((*axes, N), out.data_ptr())
        found = [y.detach(), out, grad_input, leaf.grad, scale.grad, w.grad, b.grad]
        assert leaf.grad is not None
        assert leaf.grad.shape == leaf.shape
        made.append([value.flatten().clone() for value in found if value is not None])
    assert len(made[0]) == 7
    for ours, theirs in zip(*made, strict=True):
        assert torch.equal(ours, theirs)


def test_leading_axes_that_do_not_fit_are_refused(rng: np.random.Generator) -> None:
    """What belongs to rows has x's leading axes, and buffers a view [M, n]; each with what was given."""
    x, w, b = torch.randn(2, 70, K), torch.randn(G, N, K), torch.randn(G, N)
    for rest, sentence in (
        ({"bias_scales": torch.rand(140)}, r"bias_scales is \[140\]; give x's leading axes, \[2, 70\]"),
        ({"out": torch.empty(140, N)}, r"out is \[140, 144\]; give x's leading axes \[2, 70\] and its columns"),
        ({"out": 3}, r"out is a int; give x's leading axes"),
        ({"grad_input": torch.empty(70, 2, K).transpose(0, 1)}, r"strides \[160, 320, 1\], of which there is no view"),
        ({"group_sizes": [141, 0, 0, 0, 0]}, "140"),
    ):
        with pytest.raises(ValueError, match=sentence):
            grouped_linear(**{"x": x, "weight": w, "group_sizes": SIZES, "recipe": None, "bias": b, **rest})
    with pytest.raises(ValueError, match=r"x has 160 features and weight|x has shape \[\]"):
        grouped_linear(torch.tensor(1.0), w, SIZES, recipe=None)
