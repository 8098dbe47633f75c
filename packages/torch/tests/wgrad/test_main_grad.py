"""main_grad: weight gradients straight into the weight's buffer, accumulated or overwritten, in place or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import octavo_numerics
import octavo_registry
from octavo import PRESETS, Recipe
from octavo_torch import DelayedState, GroupedLinear, dequantize, grouped_linear, quantize, quantize_weight
from octavo_torch.wgrad.main_grad import check_alignment

SIZES = [33, 0, 1, 70, 16]
M, K, N, G = 124, 48, 32, len(SIZES)
SEED = 7


@pytest.fixture(autouse=True)
def on_the_reference() -> Iterator[None]:
    """Whatever else is installed: other backends have tests of their own."""
    with octavo_registry.prefer("torch-reference"):
        yield


def state_for(recipe: Recipe) -> DelayedState | None:
    return DelayedState.create(recipe, G) if recipe.stateful else None  # type: ignore[arg-type]


def parameter(dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
    return nn.Parameter(torch.randn(G, N, K).to(dtype))


def microbatch(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """x and dy, whose rows past the sum are NaN."""
    x, dy = torch.randn(M, K).to(dtype), torch.randn(M, N).to(dtype)
    x[sum(SIZES) :] = dy[sum(SIZES) :] = torch.nan
    return x, dy


def backward(w: Any, x: Tensor, dy: Tensor, recipe: Recipe | None = None, **rest: Any) -> None:
    state = None if recipe is None else state_for(recipe)
    grouped_linear(x, w, SIZES, recipe=recipe, seed=SEED, state=state, **rest).backward(dy)


def products(x: Tensor, dy: Tensor, recipe: Recipe) -> list[tuple[Tensor, Tensor]]:
    """The float64 factors of each group's dw, [N, rows] and [rows, K], as wgrad reads them."""
    values = []
    padded = False
    for name, value in (("x", x), ("dy", dy)):
        spec = recipe.quantizer(name) if recipe.quantizes("wgrad") else None  # type: ignore[arg-type]
        if spec is None:
            values.append(value.double())
            continue
        scale = torch.ones(G) if recipe.stateful else None
        values.append(dequantize(quantize(value, spec, SIZES, seed=SEED, scale=scale), "columnwise").double())
        padded = padded or spec.hadamard
    made, start = [], 0
    for size in SIZES:
        end = start + (-(-size // 16) * 16 if padded else size)
        made.append((values[1][start:end].T, values[0][start:end]))
        start = end
    return made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", PRESETS)
def test_microbatches_accumulate_within_the_bounds(name: str, dtype: torch.dtype, rng: np.random.Generator) -> None:
    """fp32 main_grad is what it held plus the sum of every microbatch's dw; groups without rows keep their bits."""
    recipe = PRESETS[name]
    w = parameter(dtype)
    start = torch.randn(G, N, K)
    start[1, 0, 0], start[1, 0, 1] = -0.0, torch.nan
    buffer = w.main_grad = start.clone()  # type: ignore[attr-defined]
    batches = [microbatch(dtype) for _ in range(2)]
    for x, dy in batches:
        backward(w, x, dy, recipe, main_grad="accumulate")
    assert w.main_grad is buffer  # type: ignore[attr-defined]
    assert torch.equal(buffer[1].view(torch.int32), start[1].view(torch.int32))
    parts = [products(x, dy, recipe) for x, dy in batches]
    for g, size in enumerate(SIZES):
        if not size:
            continue
        # one sum over the rows of both, and what the buffer held is a product with the identity
        a = torch.cat([*(part[g][0] for part in parts), start[g].double()], 1)
        b = torch.cat([*(part[g][1] for part in parts), torch.eye(K, dtype=torch.float64)], 0)
        bound = octavo_numerics.error_bound(recipe, a.shape[1], gemm="wgrad", out_dtype="float32")
        report = bound.check(buffer[g].double().numpy(), a.numpy(), b.T.numpy(), zero_mean=False)
        assert report.passed, report.describe()


@pytest.mark.parametrize("name", PRESETS)
def test_overwrite_has_the_bits_of_dw(name: str, rng: np.random.Generator) -> None:
    """NaN in the buffer is gone, groups without rows are +0, and the flag of the weight does the same."""
    recipe = PRESETS[name].model_copy()
    x, dy = microbatch()
    w = parameter()
    backward(w, x, dy, recipe)
    expected = w.grad
    assert expected is not None
    for mode in ("overwrite", "accumulate"):
        w.grad = None
        w.main_grad = torch.full_like(w, torch.nan)  # type: ignore[attr-defined]
        w.overwrite_main_grad = mode == "accumulate"  # type: ignore[attr-defined]
        for _ in range(2):
            backward(w, x, dy, recipe, main_grad=mode)
        assert torch.equal(w.main_grad, expected)  # type: ignore[attr-defined]
        assert not w.main_grad[1].view(torch.int16).any()  # type: ignore[attr-defined]


def apart(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Memory with a pattern, and a [G, N, K] view of it whose rows and groups stand apart."""
    memory = torch.full((G, N + 3, K + 16), 5.0, dtype=dtype)
    return memory, memory[:, 1 : N + 1, 8 : K + 8]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", ["accumulate", "overwrite"])
def test_strided_buffers_are_written_in_place(mode: str, dtype: torch.dtype, rng: np.random.Generator) -> None:
    """Bits of the contiguous buffer's, and nothing beside them is touched (faults of strides)."""
    x, dy = microbatch()
    w = parameter()
    memory, view = apart(dtype)
    w.main_grad = torch.full((G, N, K), 5.0, dtype=dtype)  # type: ignore[attr-defined]
    backward(w, x, dy, main_grad=mode)
    expected = w.main_grad  # type: ignore[attr-defined]
    w.main_grad = view  # type: ignore[attr-defined]
    backward(w, x, dy, main_grad=mode)
    assert torch.equal(view, expected)
    view.fill_(5.0)
    assert bool((memory == 5.0).all())


@pytest.mark.parametrize("mode", ["accumulate", "overwrite"])
def test_flat_buffers_are_written_through_views(mode: str, rng: np.random.Generator) -> None:
    """[G * N * K] and [G * N, K], its rows apart or not: the bits of the buffer in the weight's shape, in place; of one
    tensor per group [N * K] likewise."""
    x, dy = microbatch()
    w = parameter()
    start = torch.randn(G, N, K)
    w.main_grad = start.clone()  # type: ignore[attr-defined]
    backward(w, x, dy, main_grad=mode)
    expected = w.main_grad  # type: ignore[attr-defined]
    wide = torch.full((G * N, K + 8), 5.0)
    wide[:, :K] = start.view(G * N, K)
    for buffer in (start.flatten().clone(), start.view(G * N, K).clone(), wide[:, :K]):
        w.main_grad = buffer  # type: ignore[attr-defined]
        backward(w, x, dy, main_grad=mode)
        assert w.main_grad is buffer  # type: ignore[attr-defined]
        assert torch.equal(buffer.reshape(G, N, K), expected)
    assert bool((wide[:, K:] == 5.0).all())
    parts = [nn.Parameter(part) for part in w.detach().unbind(0)]
    for part, values in zip(parts, start, strict=True):
        part.main_grad = values.flatten().clone()  # type: ignore[attr-defined]
    backward(parts, x, dy, main_grad=mode)
    assert torch.equal(torch.stack([part.main_grad for part in parts]).view(G, N, K), expected)  # type: ignore[attr-defined]


def test_get_main_grad_is_asked_in_backward_alone(rng: np.random.Generator) -> None:
    """It goes before main_grad, and may make the buffer late; afterwards weight.main_grad is that buffer, for hooks
    that look for it there, as Megatron-FSDP's do."""
    w, (x, dy) = parameter(), microbatch()
    late: list[Tensor] = []

    def get_main_grad() -> Tensor:
        late.append(torch.zeros(G, N, K))
        return late[-1]

    w.get_main_grad = get_main_grad  # type: ignore[attr-defined]
    other = w.main_grad = torch.zeros(G, N, K)  # type: ignore[attr-defined]
    seen: list[Tensor] = []
    w.register_post_accumulate_grad_hook(lambda p: seen.append(p.main_grad))  # type: ignore[attr-defined]
    y = grouped_linear(x, w, SIZES, recipe=None, main_grad="accumulate")
    assert not late
    assert w.main_grad is other  # type: ignore[attr-defined]
    y.backward(dy)
    assert len(late) == 1
    assert late[0].any()
    assert not other.any()
    assert w.main_grad is seen[0] is late[0]  # type: ignore[attr-defined]


def test_hooks_fire_once_after_the_flag(rng: np.random.Generator) -> None:
    """Autograd's gradient is zeros: hooks of DDP's and FSDP's kind see it once a backward, and the flag is set by then.

    A gradient that is there already stays what it is.
    """
    w, (x, dy) = parameter(), microbatch()
    w.main_grad = torch.zeros(G, N, K)  # type: ignore[attr-defined]
    w.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    seen: list[Tensor] = []

    def hook(p: Tensor) -> None:
        assert p.grad_added_to_main_grad is True  # type: ignore[attr-defined]
        assert p.grad is not None
        seen.append(p.grad)
        p.grad = None

    handle = w.register_post_accumulate_grad_hook(hook)
    for count in (1, 2):
        backward(w, x, dy, main_grad="accumulate")
        assert len(seen) == count
        assert seen[-1].shape == w.shape
        assert not seen[-1].any()
    handle.remove()
    w.grad = torch.ones_like(w)
    backward(w, x, dy, main_grad="accumulate")
    assert torch.equal(w.grad, torch.ones_like(w))


@pytest.mark.parametrize("parted", [False, True], ids=["single", "per group"])
@pytest.mark.parametrize("delayed", [False, True], ids=["at once", "delayed"])
def test_the_gradient_for_autograd_takes_no_memory(parted: bool, delayed: bool, rng: np.random.Generator) -> None:
    """.grad after .backward() has the bytes of one element, microbatch after microbatch; torch.autograd.grad returns
    the same."""
    groups, k, n = 2, 256, 128
    layer = GroupedLinear(
        groups, k, n, dtype=torch.bfloat16, main_grad="accumulate", per_group_parameters=parted, delay_wgrad=delayed,
        backend="torch-reference",
    )  # fmt: skip
    leaves = list(layer.parameters())
    for leaf in leaves:
        leaf.main_grad = torch.zeros(leaf.shape)  # type: ignore[attr-defined]
    x, dy = torch.randn(4, k).bfloat16(), torch.randn(4, n).bfloat16()
    for _ in range(3):
        y = layer(x, [1, 3])
        y.backward(dy)
        if delayed:
            layer.backward_dw()
        for leaf in leaves:
            assert leaf.grad is not None
            assert (leaf.grad.shape, leaf.grad.dtype) == (leaf.shape, leaf.dtype)
            assert leaf.grad.untyped_storage().nbytes() == leaf.element_size()
            assert not leaf.grad.any()
            assert leaf.main_grad.any()  # type: ignore[attr-defined]
    if not delayed:
        for dummy in torch.autograd.grad(layer(x, [1, 3]), leaves, dy):
            assert dummy.untyped_storage().nbytes() == dummy.element_size()


@pytest.mark.parametrize("name", ["bf16", "mxfp8", "nvfp4"])
def test_the_other_gradients_do_not_change(name: str, rng: np.random.Generator) -> None:
    """y, dx, db and the gradient of bias_scales have the bits of a call without main_grad."""
    w, (x, dy) = parameter(), microbatch()
    b, s = torch.randn(G, N), torch.randn(M)
    w.main_grad = torch.zeros(G, N, K)  # type: ignore[attr-defined]
    made = []
    for mode in (None, "accumulate"):
        leaves = [value.clone().requires_grad_() for value in (x, b, s)]
        y = grouped_linear(
            leaves[0], w, SIZES, recipe=PRESETS[name], bias=leaves[1], bias_scales=leaves[2], main_grad=mode, seed=SEED
        )  # type: ignore[call-overload]
        y.backward(dy)
        made.append([y.detach(), *(leaf.grad for leaf in leaves)])
    for plain, fused in zip(*made, strict=True):
        assert torch.equal(plain, fused)


def test_without_a_weight_gradient_nothing_is_touched(rng: np.random.Generator) -> None:
    """A frozen weight, no_grad, and a backward that asks for dx alone: no buffer is needed or written."""
    w, (x, dy) = parameter(), microbatch()
    x.requires_grad_()
    with torch.no_grad():
        grouped_linear(x, w, SIZES, recipe=None, main_grad="accumulate")
    w.requires_grad_(False)
    grouped_linear(x, w, SIZES, recipe=None, main_grad="accumulate").backward(dy)
    w.requires_grad_()
    w.main_grad = torch.zeros(G, N, K)  # type: ignore[attr-defined]
    y = grouped_linear(x, w, SIZES, recipe=None, main_grad="accumulate")
    torch.autograd.grad(y, x, dy, retain_graph=True)
    y.backward(dy, inputs=[x])
    assert not w.main_grad.any()  # type: ignore[attr-defined]
    assert not hasattr(w, "grad_added_to_main_grad")


@pytest.mark.parametrize("reentrant", [False, True])
def test_recompute_accumulates_once(reentrant: bool, rng: np.random.Generator) -> None:
    """Activation checkpointing runs forward twice and adds the gradient once, with the same bits."""
    layer = GroupedLinear(G, K, N, recipe=PRESETS["mxfp8"], dtype=torch.bfloat16, main_grad="accumulate")
    x, dy = microbatch()
    made = []
    runs: list[Callable[[Tensor], Any]] = [
        lambda leaf: layer(leaf, SIZES),
        lambda leaf: checkpoint(layer, leaf, SIZES, use_reentrant=reentrant),
    ]
    for forward in runs:
        layer.weight.main_grad = torch.zeros(G, N, K)  # type: ignore[attr-defined]
        forward(x.clone().requires_grad_()).backward(dy)
        made.append(layer.weight.main_grad)  # type: ignore[attr-defined]
    assert made[0].any()
    assert torch.equal(*made)


def test_quantized_weights(rng: np.random.Generator) -> None:
    """The buffer is that of the weight which was quantized; two microbatches in one backward add up."""
    recipe = PRESETS["mxfp8"]
    w = parameter()
    w.main_grad = torch.zeros(G, N, K)  # type: ignore[attr-defined]
    batches = [microbatch() for _ in range(2)]
    for x, dy in batches:
        backward(w, x, dy, recipe, main_grad="accumulate")
    separate = w.main_grad  # type: ignore[attr-defined]
    w.main_grad = torch.zeros(G, N, K)  # type: ignore[attr-defined]
    handle = quantize_weight(w, recipe)
    ys = [grouped_linear(x, handle, SIZES, recipe=recipe, main_grad="accumulate") for x, _ in batches]
    torch.autograd.backward(ys, [dy for _, dy in batches])
    # of two microbatches the order of the two additions to +0 does not matter
    assert torch.equal(w.main_grad, separate)  # type: ignore[attr-defined]


def overlapping() -> Tensor:
    return torch.zeros(K).expand(G, N, K)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "absent": (lambda: None, r"weight.main_grad is None or absent; set it to a float32 tensor \[5, 32, 48\] on cpu"),
    "type": (lambda: 3.0, "weight.main_grad is a float; give a plain strided tensor"),
    "shape": (lambda: torch.zeros(G, K, N), r"is float32 \[5, 48, 32\] on cpu; give .* \[5, 32, 48\] on cpu"),
    "another flat": (lambda: torch.zeros(G * K * N - 1), r"is float32 \[7679\] on cpu; .* as \[7680\] or \[160, 48\]"),
    "every other": (lambda: torch.zeros(2 * G * K * N)[::2], r"has shape \[7680\] and strides \[2\]"),
    "dtype": (lambda: torch.zeros(G, N, K, dtype=torch.float64), "is float64"),
    "device": (lambda: torch.zeros(G, N, K, device="meta"), r"on meta; give .* on cpu"),
    "gradient": (lambda: torch.zeros(G, N, K, requires_grad=True), "requires a gradient"),
    "sparse": (lambda: torch.zeros(G, N, K).to_sparse(), "torch.sparse_coo tensor; give a plain strided"),
    "expanded": (overlapping, r"strides \[0, 0, 1\], which cannot be written in place; give a buffer whose"),
    "columns apart": (lambda: torch.zeros(G, K, N).transpose(1, 2), r"strides \[1536, 1, 32\]"),
    "groups interleaved": (lambda: torch.zeros(N, G, K).transpose(0, 1), r"strides \[48, 240, 1\]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_anything_runs(name: str) -> None:
    """In forward for main_grad, in backward for what get_main_grad returned; one line, and no gradient is left."""
    make, pattern = REFUSED[name]
    w, (x, dy) = parameter(), microbatch()
    w.main_grad = make()  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=pattern) as caught:
        grouped_linear(x, w, SIZES, recipe=None, main_grad="accumulate")
    assert "\n" not in str(caught.value)
    w.get_main_grad = make  # type: ignore[attr-defined]
    y = grouped_linear(x, w, SIZES, recipe=None, main_grad="accumulate")
    with pytest.raises(ValueError, match=pattern.replace(r"weight.main_grad", r"weight.get_main_grad\(\)")):
        y.backward(dy)
    assert w.grad is None
    assert not hasattr(w, "grad_added_to_main_grad")


def test_buffers_on_a_gpu_are_whole_pieces() -> None:
    """16-byte pieces, which the check of CUDA buffers asks for; rows that no such kernel serves are not judged."""
    memory = torch.zeros(G, N, K + 16)
    check_alignment("b", memory[..., 4 : K + 4])
    with pytest.raises(ValueError, match=r"b starts at 0x.* multiples of 16 bytes"):
        check_alignment("b", memory[..., 1 : K + 1])
    with pytest.raises(ValueError, match=r"are \[6272, 196\] bytes apart"):
        check_alignment("b", torch.zeros(G, N, K + 1)[..., :K])
    check_alignment("b", torch.zeros(G, N, K - 1))


@pytest.mark.parametrize("rows", [0, 4])
def test_no_group_has_rows(rows: int, rng: np.random.Generator) -> None:
    """Accumulating keeps every bit, overwriting leaves +0; hooks and flag come all the same."""
    w = parameter()
    for mode in ("accumulate", "overwrite"):
        start = torch.randn(G, N, K)
        w.main_grad = start.clone()  # type: ignore[attr-defined]
        w.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        x = torch.full((rows, K), torch.nan, dtype=w.dtype)
        y = grouped_linear(x, w, [0] * G, recipe=None, main_grad=mode)  # type: ignore[call-overload]
        y.backward(torch.full((rows, N), torch.nan, dtype=w.dtype))
        assert torch.equal(w.main_grad, start if mode == "accumulate" else torch.zeros(G, N, K))  # type: ignore[attr-defined]
        assert w.grad_added_to_main_grad  # type: ignore[attr-defined]


def test_modes_and_weights_that_are_refused() -> None:
    """Other modes, and weights that are results, whose source would get zeros."""
    w, (x, _) = parameter(), microbatch()
    with pytest.raises(ValueError, match="main_grad is 'add'; give 'accumulate', 'overwrite' or None"):
        grouped_linear(x, w, SIZES, recipe=None, main_grad="add")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"main_grad is a Tensor; set it as weight.main_grad"):
        grouped_linear(x, w, SIZES, recipe=None, main_grad=torch.zeros(G, N, K))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="main_grad is a ndarray"):
        grouped_linear(x, w, SIZES, recipe=None, main_grad=np.zeros(2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="main_grad is True"):
        GroupedLinear(G, K, N, main_grad=True)  # type: ignore[arg-type]
    derived = w * 2
    derived.main_grad = torch.zeros(G, N, K)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="weight is the result of an operation"):
        grouped_linear(x, derived, SIZES, recipe=None, main_grad="accumulate")


def test_compiled_calls_stay_out_of_the_graph_or_are_refused(rng: np.random.Generator) -> None:
    """torch.compile gives eager's bits beside its graph, and with fullgraph=True a sentence; no gradient is lost."""
    torch.compiler.reset()
    layer = GroupedLinear(G, K, N, recipe=PRESETS["mxfp8"], dtype=torch.bfloat16, main_grad="accumulate")
    x, dy = microbatch()
    sizes = torch.tensor(SIZES)
    made = []
    for forward in (layer, torch.compile(layer, backend="aot_eager")):
        layer.weight.main_grad = torch.zeros(G, N, K)  # type: ignore[attr-defined]
        forward(x, sizes).backward(dy)
        made.append(layer.weight.main_grad)  # type: ignore[attr-defined]
    assert made[0].any()
    assert torch.equal(*made)
    torch.compiler.reset()
    with pytest.raises(Exception, match="main_grad or delayed_wgrad was given, and a traced backward can neither"):
        torch.compile(layer, backend="aot_eager", fullgraph=True)(x, sizes)
    torch.compiler.reset()
