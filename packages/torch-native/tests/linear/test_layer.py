"""octavo_torch.grouped_linear on this backend alone: values and gradients of every recipe, buffers, compiled graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from gemm_layers import SEED, Layer, draw_layer
from torch import Tensor

from octavo import PRESETS, HighPrecision, Recipe
from octavo.recipe_base import GEMMS
from octavo_torch import DelayedState, GroupedLinear, grouped_linear, grouped_mm, quantize_weight
from octavo_torch.arithmetic import operations as reference_ops
from octavo_torch.linear.call import Call
from octavo_torch.linear.grouped import apply
from octavo_torch_native.backend import NativeBackend
from octavo_torch_native.plugin import CARD
from octavo_torch_native.quantizers import operators
from octavo_torch_native.quantizers.kernel import kernel_of

BACKEND = "torch-native"
SPLIT = [33, 0, 1, 70, 16]


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch.compiler.reset()


def state_of(layer: Layer) -> DelayedState | None:
    """The problem's own scales, in the order of a state's operands."""
    if not layer.recipe.stateful:
        return None
    state = DelayedState.create(layer.recipe, len(layer.problem.sizes), layer.device)  # type: ignore[arg-type]
    for index, operand in enumerate(("x", "w", "dy")):
        state.scale[index].copy_(torch.from_numpy(layer.problem.scales[operand]))
    return state


def step(layer: Layer, **rest: Any) -> dict[str, Tensor]:
    """y, dx and dw of one forward and backward."""
    x, w = layer.array("x").requires_grad_(), layer.array("w").requires_grad_()
    y = grouped_linear(
        x, w, layer.sizes, recipe=layer.recipe, seed=SEED, state=state_of(layer), backend=BACKEND, **rest
    )
    dx, dw = torch.autograd.grad(y, (x, w), layer.array("dy"))
    return {"fprop": y.detach(), "dgrad": dx, "wgrad": dw}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", PRESETS)
def test_gradients_end_to_end(name: str, dtype: str, rng: np.random.Generator) -> None:
    """y, dx, dw against float64 on the definition's codes; NaN tails change nothing (faults 8 to 12, 38, 65)."""
    layer = draw_layer(rng, PRESETS[name], dtype, sizes=SPLIT)
    made = step(layer)
    for gemm in GEMMS:
        layer.check(gemm, made[gemm])
    for gemm, value in step(layer).items():
        assert torch.equal(value, made[gemm]), f"{gemm}, repeated"


@pytest.mark.parametrize("name", ["bf16", "mxfp8", "nvfp4", "fp8-current"])
def test_everything_is_served_here(name: str, rng: np.random.Generator) -> None:
    """Nothing falls back to another backend, and operands come in the layouts of the GEMMs (fault 57)."""
    import octavo_registry
    from octavo_registry.contract.request import Request

    recipe = PRESETS[name]
    request = Request(
        op="fprop", framework="torch", device="cpu", in_dtype="bfloat16", out_dtype="bfloat16", recipe=recipe
    )
    plan = octavo_registry.plan_layer(request)
    assert {part.backend for part in plan.plans} == {BACKEND}
    if plan.quantize_x is not None:
        assert plan.quantize_x.request.layouts == ("rows", "panels")
        assert plan.quantize_w is not None
        assert plan.quantize_w.request.layouts == ("rows", "panels")


def test_with_reference_quantizers(rng: np.random.Generator) -> None:
    """A list of backends still composes: the reference's GEMMs on plain codes where it alone may serve, this one's
    where both may."""
    layer = draw_layer(rng, PRESETS["mxfp8"], sizes=SPLIT)
    x, w = layer.array("x"), layer.array("w")
    results = {}
    for backend in ("torch-reference", ("torch-reference", BACKEND), (BACKEND, "torch-reference"), BACKEND):
        results[backend] = grouped_linear(x, w, layer.sizes, recipe=layer.recipe, backend=backend)
        layer.check("fprop", results[backend])
    assert torch.equal(results[BACKEND], results[BACKEND, "torch-reference"])
    assert torch.equal(results["torch-reference"], results["torch-reference", BACKEND])


@pytest.mark.parametrize("name", ["bf16", "mxfp8"])
def test_out_and_grad_input(name: str, rng: np.random.Generator) -> None:
    """The caller's buffers get y and dx."""
    layer = draw_layer(rng, PRESETS[name], sizes=SPLIT)
    expected = step(layer)
    out = torch.full(layer.shape("fprop"), torch.nan, dtype=torch.bfloat16)
    grad_input = torch.full(layer.shape("dgrad"), torch.nan, dtype=torch.bfloat16)
    made = step(layer, out=out, grad_input=grad_input)
    for gemm in GEMMS:
        assert torch.equal(made[gemm], expected[gemm])
    assert torch.equal(out, expected["fprop"])
    assert torch.equal(grad_input, expected["dgrad"])


@pytest.mark.parametrize("mode", ["accumulate", "overwrite"])
@pytest.mark.parametrize("name", PRESETS)
def test_main_grad_is_written_in_place(name: str, mode: str, rng: np.random.Generator) -> None:
    """fp32 dw goes into a strided main_grad: with the bits of out=, empty groups keep theirs or are +0 (issue 7)."""
    layer = draw_layer(rng, PRESETS[name], sizes=SPLIT)
    groups, n, k = layer.shape("wgrad")
    memory = torch.full((groups, n + 1, k + 16), 3.0)
    buffer = memory[:, :n, :k]
    start = torch.zeros(groups, n, k)
    start[1] = 5.0
    buffer.copy_(start)
    x, w = layer.array("x"), layer.array("w").requires_grad_()
    w.main_grad = buffer  # type: ignore[attr-defined]
    made = []
    for _ in range(2):
        y = grouped_linear(
            x, w, layer.sizes, recipe=layer.recipe, seed=SEED, state=state_of(layer), backend=BACKEND, main_grad=mode
        )  # type: ignore[call-overload]
        y.backward(layer.array("dy"))
        made.append(buffer.clone())
    full = SPLIT.index(0)
    assert torch.equal(made[0][full], start[full] if mode == "accumulate" else torch.zeros(n, k))
    first = made[0].clone()
    first[full] = 0.0
    layer.check("wgrad", first)
    assert torch.equal(made[1], 2 * first + start if mode == "accumulate" else first)
    assert bool((memory[:, n:] == 3.0).all())
    assert bool((memory[:, :, k:] == 3.0).all())
    assert w.grad_added_to_main_grad  # type: ignore[attr-defined]
    assert w.grad is not None
    assert not w.grad.any()


@pytest.mark.parametrize("name", ["bf16", "fp8-block", "nvfp4"])
def test_quantized_weights_are_used_again(name: str, rng: np.random.Generator) -> None:
    """quantize_weight once, the same bits in every microbatch; no conversion on the way."""
    layer = draw_layer(rng, PRESETS[name], sizes=SPLIT)
    w = layer.array("w").requires_grad_()
    handle = quantize_weight(w, layer.recipe, backend=BACKEND)
    expected = step(layer)
    x = layer.array("x").requires_grad_()
    y = grouped_linear(x, handle, layer.sizes, recipe=layer.recipe, seed=SEED, backend=BACKEND)
    dx, dw = torch.autograd.grad(y, (x, w), layer.array("dy"))
    for gemm, value in zip(GEMMS, (y, dx, dw), strict=True):
        assert torch.equal(value, expected[gemm]), gemm


def test_grouped_mm(rng: np.random.Generator) -> None:
    """torch's own convention: weights [G, K, N] of any strides, cumulative ends."""
    layer = draw_layer(rng, HighPrecision(), sizes=SPLIT)
    ends = layer.sizes.cumsum(0).int()
    b = layer.array("w").transpose(1, 2)
    expected = grouped_linear(layer.array("x"), layer.array("w"), layer.sizes, recipe=None)
    for weights in (b, b.contiguous()):
        assert torch.equal(grouped_mm(layer.array("x"), weights, ends), expected)


def test_a_module_learns(rng: np.random.Generator) -> None:
    """Three steps of a layer go where the reference's go, up to the rounding of sums (fault 65)."""
    x = torch.randn(60, 48)
    losses = []
    for backend in (BACKEND, "torch-reference"):
        torch.manual_seed(1)
        module = GroupedLinear(3, 48, 32, recipe=PRESETS["mxfp8"], backend=backend)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        for _ in range(3):
            optimizer.zero_grad()
            loss = module(x, [20, 0, 40]).square().mean()
            loss.backward()
            optimizer.step()
        losses.append(loss.detach())
    # codes of the last step may differ where a weight was rounded otherwise: one step of E4M3, 2^-3, in one of the 32
    # elements of a block is 2^-8 of the whole
    torch.testing.assert_close(*losses, rtol=2**-8, atol=0)


@pytest.mark.parametrize("name", ["bf16", "fp8-current", "fp8-block", "mxfp8", "mxfp8-forward-only", "nvfp4"])
def test_compiled(name: str, rng: np.random.Generator, fresh_compiler: None) -> None:
    """One graph, forward and backward, with the bits of eager for every split of the rows (faults 46, 63)."""
    recipe = PRESETS[name]
    w = torch.randn(3, 32, 64, requires_grad=True)
    bias = torch.randn(3, 32, requires_grad=True)

    def run(x: Tensor, sizes: Tensor, scales: Tensor) -> Tensor:
        return grouped_linear(x * 2, w, sizes, recipe=recipe, seed=3, bias=bias, bias_scales=scales, backend=BACKEND)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for sizes in ([20, 0, 40], [0, 60, 0], [1, 2, 57]):
        x, dy, scales = torch.randn(70, 64), torch.randn(70, 32), torch.randn(70)
        results = []
        for call in (run, compiled):
            leaf = x.clone().requires_grad_()
            y = call(leaf, torch.tensor(sizes), scales)
            results.append([y, *torch.autograd.grad(y, (leaf, w, bias), dy)])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), sizes
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_out_in_a_graph(rng: np.random.Generator, fresh_compiler: None) -> None:
    """A compiled call writes the caller's buffer where it stands."""
    x, w, sizes = torch.randn(70, 64), torch.randn(3, 32, 64), torch.tensor([20, 0, 40])
    out = torch.full((70, 32), torch.nan)
    address = out.data_ptr()

    def run(x: Tensor, out: Tensor) -> Tensor:
        return grouped_linear(x, w, sizes, recipe=PRESETS["mxfp8"], out=out, backend=BACKEND) + 1

    expected = run(x, torch.empty(70, 32))
    with torch.no_grad():
        made = torch.compile(run, fullgraph=True, backend="aot_eager")(x, out)
    assert torch.equal(made, expected)
    assert torch.equal(out + 1, expected)
    assert out.data_ptr() == address


def check(operator: Any, *arguments: Any, schema: bool = False) -> None:
    """torch's own checks; its schema test compares no float8 tensors."""
    utilities = ("test_schema", "test_faketensor") if schema else ("test_faketensor",)
    torch.library.opcheck(operator, arguments, test_utils=utilities)


@pytest.mark.parametrize("name", ["bf16", "mxfp8", "nvfp4", "fp8-current"])
def test_fake_kernels(name: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operators that a layer calls have the shapes, dtypes, strides and mutations that they state (fault 46)."""
    from octavo_torch_native.gemm import operators as gemm_ops

    recipe: Recipe = PRESETS[name]
    layer = draw_layer(rng, recipe, sizes=SPLIT)
    calls: list[tuple[Any, ...]] = []
    real = gemm_ops.gemm
    monkeypatch.setattr(gemm_ops, "gemm", lambda *given: (calls.append(given), real(*given))[1])
    bias = torch.full(layer.problem.w.shape[:2], float(layer.array("x")[0, 0]), dtype=torch.bfloat16)
    step(layer, bias=bias, bias_scales=torch.ones(len(layer.problem.x)))  # which no whole layer takes
    monkeypatch.undo()
    assert len(calls) == len(GEMMS)
    space = torch.ops.octavo_torch_native
    for given in calls:
        plain = given[0].dtype is torch.bfloat16
        check(space.gemm, *given, schema=plain)
        out = gemm_ops.gemm(*given)
        check(space.gemm_into, *given, torch.zeros_like(out), schema=plain)
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
            fake = space.gemm(*given)
        assert fake.shape == out.shape
        assert fake.dtype is out.dtype


def recorded(layer: Layer, backend: str, *, frozen: bool = False, weights: bool = False) -> DelayedState:
    """The state after one step with NaN, Inf and poisoned tails."""
    state = state_of(layer)
    assert state is not None
    x, w, dy = layer.array("x"), layer.array("w"), layer.array("dy")
    x[33, 3], x[50, 1], dy[0, 0] = torch.inf, -300.0, torch.nan
    x.requires_grad_(not frozen)
    w.requires_grad_()
    matrices: Any = quantize_weight(w, layer.recipe, state=state, backend=backend) if weights else w
    y = grouped_linear(x, matrices, layer.sizes, recipe=layer.recipe, state=state, backend=backend)
    torch.autograd.grad(y, (w,) if frozen else (x, w), dy)
    return state


@pytest.fixture
def amax_calls(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What the reference takes the amax of from here on."""
    calls: list[Tensor] = []
    real = reference_ops.group_amax_of
    monkeypatch.setattr(reference_ops, "group_amax_of", lambda x, sizes: (calls.append(x), real(x, sizes))[1])
    return calls


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("rest", [{}, {"frozen": True}, {"weights": True}], ids=["all", "no dx", "quantize_weight"])
def test_amax_comes_with_the_codes(
    dtype: str, rest: dict[str, bool], rng: np.random.Generator, amax_calls: list[Tensor]
) -> None:
    """Delayed scaling records bit for bit what the reference records, and no operand is read once more for it."""
    layer = draw_layer(rng, PRESETS["fp8-delayed"], dtype, sizes=SPLIT)
    state = recorded(layer, BACKEND, **rest)
    assert not amax_calls
    expected = recorded(layer, "torch-reference", **rest)
    assert len(amax_calls) == 3
    assert torch.equal(state.history.view(torch.int32), expected.history.view(torch.int32))
    assert torch.equal(state.scale, expected.scale)
    assert state.history[0, 0, 2].isinf()
    assert not state.history[:, 0, 1][[0, 2]].any()


def test_no_amax_where_nothing_is_recorded(
    rng: np.random.Generator, amax_calls: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation's launches make codes alone, and the state stays as it is."""
    layer = draw_layer(rng, PRESETS["fp8-delayed"], sizes=SPLIT)
    state = state_of(layer)
    assert state is not None
    x, w = layer.array("x"), layer.array("w")
    works: list[str] = []
    real = operators.quantize
    monkeypatch.setattr(operators, "quantize", lambda *given: (works.append(given[3]), real(*given))[1])
    y = apply(x, w, layer.sizes, None, None, Call(layer.recipe, BACKEND, state=state, record=False))
    buffered = Call(layer.recipe, BACKEND, state=state, record=False, out=torch.empty_like(y))
    apply(x, w, layer.sizes, None, None, buffered)  # which no whole layer takes
    assert not amax_calls
    assert not state.history.any()
    assert [kernel_of(work).extras for work in works] == [[], []]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_with_amax_is_the_reference(dtype: torch.dtype) -> None:
    """Codes of `run`, amax of the reference: NaN wins over Inf, empty groups have 0, tails are not read."""
    import octavo_registry
    from octavo import QuantizerSpec
    from octavo_registry.contract.request import Request

    name = str(dtype).removeprefix("torch.")
    x = torch.randn(130, 48).to(dtype)
    x[40, 5], x[41, 6], x[45, 1], x[120:] = torch.inf, -torch.nan, -torch.inf, torch.nan
    sizes = torch.tensor([33, 0, 9, 70, 8])
    for orientation in ("rowwise", "columnwise", "both"):
        spec = QuantizerSpec(scaling="delayed", format="e4m3", orientation=orientation)
        request = Request(op="quantize", framework="torch", device="cpu", in_dtype=name, out_dtype=name, quantizer=spec)
        plan = octavo_registry.plan(request, backend=BACKEND)
        assert plan.bound.with_amax is not None
        codes, amax = plan.bound.with_amax(x, sizes, scale=torch.ones(5))
        expected = reference_ops.group_amax_of(x, sizes)
        assert expected[2].isnan()
        assert torch.equal(amax.view(torch.int32), expected.view(torch.int32))
        plain = plan.run(x, sizes, scale=torch.ones(5))
        for plane in ("rowwise", "rowwise_scale", "columnwise", "columnwise_scale"):
            made, wanted = getattr(codes, plane), getattr(plain, plane)
            assert (made is None) == (wanted is None)
            assert made is None or torch.equal(made.view(torch.uint8), wanted.view(torch.uint8))


def test_compiled_amax(rng: np.random.Generator, fresh_compiler: None) -> None:
    """One graph without the reference's operator; the history of an eager step."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    layer = draw_layer(rng, PRESETS["fp8-delayed"], sizes=SPLIT)
    targets: list[str] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        targets.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    def run(x: Tensor, w: Tensor, sizes: Tensor, state: DelayedState) -> Tensor:
        return grouped_linear(x, w, sizes, recipe=layer.recipe, state=state, backend=BACKEND)

    # as inductor: without these torch cannot split a graph whose backward changes an input
    compiler = aot_autograd(
        fw_compiler=keep,
        bw_compiler=keep,
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )
    states = []
    for call in (run, torch.compile(run, fullgraph=True, backend=compiler)):
        state = state_of(layer)
        assert state is not None
        x, w = layer.array("x").requires_grad_(), layer.array("w").requires_grad_()
        torch.autograd.grad(call(x, w, layer.sizes, state), (x, w), layer.array("dy"))
        states.append(state)
    assert torch.equal(states[0].history, states[1].history)
    assert states[0].history[:, 0].any(1).all()
    assert targets.count("octavo_torch_native.quantize.default") == 3
    assert "octavo_torch.group_amax.default" not in targets


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of each plan that is launched from here on."""
    made: list[int] = []
    real = operators.plan
    monkeypatch.setattr(operators, "plan", lambda sizes, rows, like: (made.append(rows), real(sizes, rows, like))[1])
    return made


@pytest.mark.parametrize("name", PRESETS)
def test_one_plan_a_step(name: str, rng: np.random.Generator, plans: list[int]) -> None:
    """Quantizers of x and dy and three GEMMs share the layer's plan; so do the sums of the bias."""
    layer = draw_layer(rng, PRESETS[name], sizes=SPLIT)
    bias = torch.zeros(layer.problem.w.shape[:2], dtype=torch.bfloat16, requires_grad=True)
    step(layer, bias=bias, bias_scales=torch.ones(len(layer.problem.x)))  # which no whole layer takes
    assert plans == [len(layer.problem.x)]


@pytest.mark.parametrize("name", ["bf16", "mxfp8", "fp8-delayed"])
def test_sizes_overwritten_before_backward(name: str, rng: np.random.Generator) -> None:
    """A router's buffer that holds the next step's sizes already: gradients are those of the sizes of forward."""
    layer = draw_layer(rng, PRESETS[name], sizes=SPLIT)
    expected = step(layer)
    x, w, sizes = layer.array("x").requires_grad_(), layer.array("w").requires_grad_(), layer.sizes.long()
    y = grouped_linear(x, w, sizes, recipe=layer.recipe, seed=SEED, state=state_of(layer), backend=BACKEND)
    sizes.copy_(sizes.flip(0))
    dx, dw = torch.autograd.grad(y, (x, w), layer.array("dy"))
    for gemm, value in zip(GEMMS, (y, dx, dw), strict=True):
        assert torch.equal(value, expected[gemm]), gemm


def test_no_shared_plan_with_other_backends(rng: np.random.Generator, plans: list[int]) -> None:
    """The reference's GEMMs take sizes, not plans: quantizers of this backend each make their own beside them."""
    import octavo_registry
    from octavo_registry.contract.request import Request

    class Quantizers:
        """This backend without its GEMMs."""

        def octavo_backends(self) -> list[Any]:
            rows = [row for row in CARD.capabilities if "quantize" in row.ops and row.device == "cpu"]
            rows = [row.model_copy(update={"ops": frozenset({"quantize"})}) for row in rows]
            return [CARD.model_copy(update={"name": "native-quantizers", "capabilities": tuple(rows)})]

        def octavo_load(self, name: str) -> Any:
            return NativeBackend()

    layer = draw_layer(rng, PRESETS["mxfp8"], sizes=SPLIT)
    x, w = layer.array("x").requires_grad_(), layer.array("w").requires_grad_()
    octavo_registry.register(Quantizers(), "native-quantizers")
    try:
        both = ("native-quantizers", "torch-reference")
        request = Request(
            op="fprop", framework="torch", device="cpu", in_dtype="bfloat16", out_dtype="bfloat16", recipe=layer.recipe
        )
        assert {part.backend for part in octavo_registry.plan_layer(request, backend=both).plans} == set(both)
        y = grouped_linear(x, w, layer.sizes, recipe=layer.recipe, backend=both)
        dx, dw = torch.autograd.grad(y, (x, w), layer.array("dy"))
    finally:
        octavo_registry.unregister("native-quantizers")
    assert len(plans) == 2
    for gemm, value in zip(GEMMS, (y.detach(), dx, dw), strict=True):
        layer.check(gemm, value)


def test_one_plan_in_a_graph(rng: np.random.Generator, fresh_compiler: None) -> None:
    """Compiled, forward and backward hold one plan together: backward takes it from forward."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    seen: list[list[str]] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return make_boxed_func(graph.forward)

    x, w = torch.randn(70, 64, requires_grad=True), torch.randn(3, 32, 64, requires_grad=True)
    sizes = torch.tensor([20, 0, 40])

    def run(x: Tensor, sizes: Tensor) -> Tensor:
        return grouped_linear(x, w, sizes, recipe=PRESETS["mxfp8"], backend=BACKEND)

    compiled = torch.compile(run, fullgraph=True, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))
    torch.autograd.grad(compiled(x, sizes), (x, w), torch.randn(70, 32))
    assert len(seen) == 2
    for name, expected in (("plan", [1, 0]), ("gemm", [1, 2])):
        assert [graph.count(f"octavo_torch_native.{name}.default") for graph in seen] == expected, name
