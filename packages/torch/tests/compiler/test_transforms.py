"""Every public function of tensors inside torch.func's transforms and forward mode: it works, or a sentence refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, functionalize, grad, jacfwd, jacrev, jvp, linearize, vmap
from torch.utils import _pytree as pytree

import octavo_registry
import octavo_torch as ot
from octavo import MXFP8, DelayedScaling
from octavo_registry import BackendCard, Bound, Request
from octavo_torch.moe.router import choosing
from octavo_torch.plugin import CARD
from octavo_torch.reference.backend import ReferenceBackend

G, K, N, M, C = 2, 32, 32, 8, 2
SIZES = torch.tensor([3, 4])
SPEC = MXFP8().quantizer("x")
PLAIN = ("plain", "plain")
HOW: dict[str, Any] = {"recipe": "mxfp8", "backend": "torch-reference"}
ROUNDING = 2.0**-24  # the relative error of one rounding to fp32
assert SPEC is not None

# torch's forward mode loads its decompositions with torch.jit.script, which it deprecates
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")

Function = Callable[[Tensor], Tensor]


class Given:
    """Operands, and every function as one of rows [M, K] alone."""

    def __init__(self) -> None:
        self.x, self.w = torch.randn(M, K), torch.randn(G, N, K)
        self.w1, self.w2 = torch.randn(G, 2 * N, K), torch.randn(G, K, N)
        self.index, self.weights = torch.randint(-1, G, (M, C)), torch.rand(M, C)
        self.rows, _, self.routing = ot.permute(self.x, self.index, G)
        self.linear, self.mlp = ot.GroupedLinear(G, K, N, **HOW), ot.GroupedMLP(G, K, N, **HOW)
        self.per_group = ot.GroupedLinear(G, K, N, per_group_parameters=True, **HOW)
        self.moe, self.adapted_moe = ot.MoE(G, K, N, 1, **HOW), ot.MoE(G, K, N, 1, **HOW)
        self.adapted, self.lora = ot.GroupedMLP(G, K, N, **HOW), ot.GroupedLoRA(G, K, N, rank=4)
        self.sequential = ot.Sequential(
            ot.GroupedLinear(G, K, 2 * N, **HOW), ot.Activation("swiglu"), ot.GroupedLinear(G, N, K, **HOW)
        )
        torch.nn.init.normal_(self.lora.lora_B)
        for module in (self.adapted, self.adapted_moe):
            ot.add_lora(module, 4)

    @property
    def differentiable(self) -> dict[str, Function]:
        """By name; each has one derivative."""
        return {
            "grouped_linear": lambda t: ot.grouped_linear(t, self.w, SIZES, **HOW),
            "grouped_mm": lambda t: ot.grouped_mm(t, self.w.mT, SIZES.cumsum(0).int(), recipe="mxfp8"),
            "grouped_mlp": lambda t: ot.grouped_mlp(t, self.w1, self.w2, SIZES, **HOW),
            "moe_mlp": lambda t: ot.moe_mlp(t, self.index, self.weights, self.w1, self.w2, **HOW),
            "its weights": lambda t: ot.moe_mlp(self.x, self.index, t[:, :C], self.w1, self.w2, **HOW),
            "quantize_weight": self._of_quantized_weight,
            "quantize_input": lambda t: ot.grouped_linear(
                ot.quantize_input(t, self.w, SIZES, **HOW), self.w, None, **HOW
            ),
            "one tensor per group": lambda t: ot.grouped_linear(self.x, [t, 2 * t], SIZES, **HOW),
            "activate": lambda t: ot.activate(t, "swiglu", probs=self.weights[:, 0].contiguous()),
            "Activation": ot.Activation("gelu"),
            "GroupedLinear": lambda t: self.linear(t, SIZES),
            "per_group_parameters": lambda t: self.per_group(t, SIZES),
            "GroupedMLP": lambda t: self.mlp(t, SIZES),
            "MoE": self.moe,
            "Sequential": lambda t: self.sequential(t, SIZES),
            "GroupedLoRA": lambda t: self.lora.delta(t, SIZES),
            "adapters": lambda t: self.adapted(t, SIZES),
            "adapters of a MoE": self.adapted_moe,
            "a MoE of its parts": self._composed,
        }

    @property
    def moves(self) -> dict[str, Function]:
        """Linear ones, which have derivatives of any order."""
        return {
            "permute": lambda t: ot.permute(t, self.index, G)[0],
            "unpermute": lambda t: ot.unpermute(torch.cat([t, t]), self.routing),
            "unpermute's weights": lambda t: ot.unpermute(self.rows, self.routing, t[:, :C]),
            "to_rows": lambda t: self.routing.to_rows(t[:, :C]),
        }

    @property
    def quantizers(self) -> dict[str, Function]:
        """Those without derivative, each with a floating-point result."""
        return {
            "quantize": lambda t: ot.dequantize(ot.quantize(t, SPEC, SIZES)),
            "convert_layout": lambda t: ot.dequantize(ot.convert_layout(ot.quantize(t, SPEC, SIZES), PLAIN)),
            "group_amax": lambda t: ot.group_amax(t, SIZES),
            "act_quantize": lambda t: ot.dequantize(_first(ot.act_quantize(t, SPEC, SIZES, activation="swiglu"))),
            "dact_quantize": lambda t: ot.dequantize(
                _first(ot.dact_quantize(t[:, : K // 2].contiguous(), self.x, SPEC, SIZES, activation="swiglu"))
            ),
            "norm_quantize": lambda t: ot.dequantize(
                _first(ot.norm_quantize(t, torch.ones(K), spec=SPEC, group_sizes=SIZES))
            ),
            "tensor_stats": lambda t: ot.tensor_stats(t, SPEC, SIZES).signal,
        }

    def _of_quantized_weight(self, t: Tensor) -> Tensor:
        w = torch.stack([t, t * 2])
        return ot.grouped_linear(torch.ones(M, K), ot.quantize_weight(w, **HOW), SIZES, **HOW)

    def _composed(self, t: Tensor) -> Tensor:
        """Sizes and places are made of what is differentiated."""
        choice = ot.choose_experts(t[:, :G], 1, backend="torch-reference")
        rows, sizes, routing = ot.permute(t, choice.choices, G)
        h = ot.grouped_mlp(rows, self.w1, self.w2, sizes, probs=routing.to_rows(choice.weights), **HOW)
        return ot.unpermute(h, routing)


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, tuple | list) else value


DIFFERENTIABLE, MOVES, QUANTIZERS = ([*getattr(Given(), kind)] for kind in ("differentiable", "moves", "quantizers"))


def squared(function: Function) -> Function:
    return lambda t: function(t).square().sum()


@pytest.fixture
def given(rng: np.random.Generator) -> Given:
    return Given()


@pytest.mark.parametrize("name", [*DIFFERENTIABLE, *MOVES])
def test_grad_is_that_of_backward(name: str, given: Given) -> None:
    """torch.func.grad gives the gradient of backward, bit for bit, and never zeros in its place."""
    function = {**given.differentiable, **given.moves}[name]
    leaf = given.x.clone().requires_grad_()
    squared(function)(leaf).backward()
    assert leaf.grad is not None
    assert bool(leaf.grad.any())
    assert torch.equal(grad(squared(function))(given.x), leaf.grad)


@pytest.mark.parametrize("name", [*DIFFERENTIABLE, *MOVES])
def test_grad_of_a_function_with_autocast_in_it(name: str, given: Given) -> None:
    """torch.func.grad runs backward after its function has returned, outside of the autocast in it: the gradient is
    still that of backward, of rows and weights in bf16, and no call mixes the two dtypes."""
    function = {**given.differentiable, **given.moves}[name]

    def cast(t: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return function(t)

    leaf = given.x.clone().requires_grad_()
    squared(cast)(leaf).backward()
    assert leaf.grad is not None
    assert bool(leaf.grad.any())
    assert torch.equal(grad(squared(cast))(given.x), leaf.grad)


@pytest.mark.parametrize("name", ["per_group", "adapted", "adapted_moe"])
def test_grad_of_parameters(name: str, given: Given) -> None:
    """functional_call with wrapped parameters: one tensor per group, and adapters."""
    module = getattr(given, name)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    parameters = {key: value.detach() for key, value in module.named_parameters() if value.requires_grad}
    arguments = (given.x,) if name == "adapted_moe" else (given.x, SIZES)
    found = grad(lambda own: functional_call(module, own, arguments).square().sum())(parameters)
    module(*arguments).square().sum().backward()
    for key, value in module.named_parameters():
        assert value.requires_grad is (key in found)
        if key in found:
            assert value.grad is not None
            assert torch.equal(found[key], value.grad)


@pytest.mark.parametrize("name", MOVES)
def test_moves_of_rows_have_higher_derivatives(name: str, given: Given) -> None:
    """As outside of transforms."""
    function = given.moves[name]

    def first(t: Tensor) -> Tensor:
        return grad(lambda u: function(u).pow(3).sum())(t).square().sum()

    leaf = given.x.clone().requires_grad_()
    (made,) = torch.autograd.grad(function(leaf).pow(3).sum(), leaf, create_graph=True)
    made.square().sum().backward()
    assert leaf.grad is not None
    assert torch.equal(grad(first)(given.x), leaf.grad)


@pytest.mark.parametrize("name", [*DIFFERENTIABLE, *MOVES, *QUANTIZERS])
def test_vmap_is_refused(name: str, given: Given) -> None:
    """Over a call, over its gradient, and inside of a gradient; also a Jacobian by rows, which is one of gradients."""
    function = {**given.differentiable, **given.moves, **given.quantizers}[name]
    batch = torch.stack([given.x, 2 * given.x])
    ways: list[Callable[[], Any]] = [
        lambda: vmap(function)(batch),
        lambda: vmap(grad(squared(function)))(batch),
        lambda: grad(lambda t: vmap(function)(t).sum())(batch),
    ]
    if name not in QUANTIZERS:
        ways.append(lambda: jacrev(function)(given.x))
    for way in ways:
        with pytest.raises(
            NotImplementedError, match=r"^torch.func's vmap was applied to .*, which has no rule for it"
        ):
            way()


@pytest.mark.parametrize("name", [*DIFFERENTIABLE, *MOVES])
def test_forward_mode_is_refused(name: str, given: Given) -> None:
    """jvp, a Jacobian by columns, linearize, and a tangent outside of transforms."""
    function = {**given.differentiable, **given.moves}[name]
    for way in (lambda: jvp(function, (given.x,), (given.x,)), lambda: jacfwd(function)(given.x)):
        with pytest.raises(NotImplementedError, match=r"^torch.func's jvp was applied to .* outside of that"):
            way()
    with pytest.raises(NotImplementedError, match=r"^an input of .* carries a tangent"):
        linearize(function, given.x)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=r"^an input of .* carries a tangent"):
        function(forward_ad.make_dual(given.x, given.x))
    with pytest.raises(NotImplementedError, match=r"^torch.func's functionalize was applied to .* outside of that"):
        functionalize(function)(given.x)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_what_has_no_derivative_is_a_constant(name: str, given: Given) -> None:
    """Inside of a transform as outside: the same values, through which no gradient flows."""
    function = given.quantizers[name]
    expected, seen = function(given.x), []

    def loss(t: Tensor) -> Tensor:
        seen.append(function(t))
        return (t.sum() * seen[-1].float()).sum()

    found = grad(loss)(given.x)
    assert torch.equal(seen[0], expected)
    assert not seen[0].requires_grad
    total = expected.float().sum()
    assert bool(((found - total).abs() <= 2.0**-20 * expected.float().abs().sum()).all())
    with pytest.raises(NotImplementedError, match=r"^torch.func's functionalize was applied to "):
        functionalize(function)(given.x)


class Pointers(ReferenceBackend):
    """The reference, which asks for the address of each tensor, as a kernel does."""

    def bind(self, request: Request) -> Bound:
        bound = super().bind(request)

        def run(*operands: Any, **rest: Any) -> Any:
            for value in pytree.tree_leaves((operands, rest)):
                if isinstance(value, Tensor):
                    value.data_ptr()
            made = bound.run(*operands, **rest)
            for value in pytree.tree_leaves(made):
                if isinstance(value, Tensor):
                    value.data_ptr()
            return made

        return replace(bound, run=run)


class Plugin:
    """That backend."""

    def octavo_backends(self) -> list[BackendCard]:
        return [CARD.model_copy(update={"name": "pointers", "priority": -1000})]

    def octavo_load(self, name: str) -> ReferenceBackend | None:
        return Pointers() if name == "pointers" else None


@pytest.fixture
def pointers() -> Iterator[str]:
    octavo_registry.register(Plugin(), "test-pointers")
    yield "pointers"
    octavo_registry.unregister("test-pointers")


def test_kernels_get_tensors_with_memory(pointers: str, rng: np.random.Generator) -> None:
    """Codes that are made inside of grad, with the state of delayed scaling, by functions that read addresses."""
    recipe, x, w = DelayedScaling(history=3), torch.randn(M, K), torch.randn(G, N, K)
    how: dict[str, Any] = {"recipe": recipe, "backend": pointers}
    found, histories = [], []
    for way in ("grad", "backward"):
        state = ot.DelayedState.create(recipe, G)

        def loss(x: Tensor, w: Tensor, history: Tensor, scale: Tensor) -> Tensor:
            own = ot.DelayedState(recipe, history, scale)
            weight = ot.quantize_weight(w, state=own, **how)
            codes = ot.quantize_input(x, weight, SIZES, state=own, **how)
            y = ot.grouped_linear(codes, weight, None, state=own, **how)
            amax = ot.group_amax(ot.dequantize(ot.quantize(x, SPEC, SIZES, backend=pointers), backend=pointers), SIZES)
            return y.square().sum() + amax.sum()

        if way == "grad":
            found.append(grad(loss, argnums=(0, 1))(x, w, state.history, state.scale))
        else:
            leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
            loss(*leaves, state.history, state.scale).backward()
            found.append(tuple(leaf.grad for leaf in leaves))
        histories.append(state.history)
    assert bool(histories[0].any())
    assert torch.equal(*histories)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_an_outdated_weight_inside_of_grad(rng: np.random.Generator) -> None:
    """It is refused there, too; and one that is made again is taken."""
    w, x = torch.randn(G, N, K, requires_grad=True), torch.randn(M, K)
    weight = ot.quantize_weight(w, **HOW)

    def loss(t: Tensor) -> Tensor:
        return ot.grouped_linear(t, weight, SIZES, **HOW).sum()

    grad(loss)(x)
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(ValueError, match="weight has changed in place"):
        grad(loss)(x)
    ot.quantize_weight(w, out=weight, **HOW)
    grad(loss)(x)


RULES: dict[str, dict[str, Any]] = {
    "softmax": {},
    "sigmoid in groups": {"score": "sigmoid", "groups": 4, "kept_groups": 2},
    "sqrtsoftplus": {"score": "sqrtsoftplus"},
}


@pytest.mark.parametrize("name", RULES)
def test_a_router_has_derivatives_of_both_modes(name: str, rng: np.random.Generator) -> None:
    """Jacobians by rows and by columns agree; a batch of logits is refused unless its choices are given."""
    logits, rule = torch.randn(M, 12), RULES[name]

    def weights(t: Tensor, **more: Any) -> Tensor:
        return ot.choose_experts(t, 3, **rule, backend="torch-reference", **more).weights

    by_rows, by_columns = jacrev(weights)(logits), jacfwd(weights)(logits)
    assert bool(by_rows.any())
    # 64 roundings to fp32 of an entry, two times 12 terms of sums in two orders and the functions that lead there;
    # 4 of a score, which is at most about 1, where terms cancel
    torch.testing.assert_close(by_rows, by_columns, rtol=64 * ROUNDING, atol=4 * ROUNDING)
    batch = torch.randn(3, M, 12)
    given = ot.choose_experts(logits, 3, **rule).choices
    for way in (
        lambda: vmap(weights)(batch),
        lambda: vmap(grad(lambda t: weights(t).square().sum()))(batch),
        lambda: vmap(lambda bias: weights(logits, bias=bias))(batch[:, 0]),
        lambda: vmap(lambda choices: weights(logits, replay=choices))(given.expand(3, M, 3)),
        lambda: vmap(ot.MoE(12, 32, 32, 3, recipe=None))(torch.randn(2, M, 32)),
    ):
        with pytest.raises(
            NotImplementedError, match=r"vmap was applied to choose_experts, .* give all of them in one"
        ):
            way()
    together = vmap(lambda t: weights(t, replay=given))(batch)
    assert torch.equal(together, torch.stack([weights(t, replay=given) for t in batch]))


def test_router_losses_of_a_batch(rng: np.random.Generator) -> None:
    """Counts are made in place of nothing that a vmap batches."""
    logits, choices = torch.randn(3, M, 6), torch.randint(6, (3, M, 2))
    together = vmap(lambda t, c: tuple(ot.router_losses(t, c)))(logits, choices)
    one_by_one = [tuple(ot.router_losses(t, c)) for t, c in zip(logits, choices, strict=True)]
    # Each loss sums what is not negative over M tokens and 6 experts: in any order it is off by at most M + 6 roundings
    # of itself (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2), and by a few of each term. Both
    # sides together are off by less than 6 M.
    torch.testing.assert_close(
        together, tuple(map(torch.stack, zip(*one_by_one, strict=True))), rtol=6 * M * ROUNDING, atol=0.0
    )


def test_a_backends_router_in_a_batch_of_gradients(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """A kernel takes one gradient at a time: torch's operations take many."""

    class Choosers:
        """What a backend returns."""

        def choose(self, logits: Tensor, bias: Tensor | None, replay: Tensor | None, rule: Any) -> Any:
            return choosing._composed(logits.detach(), bias, replay, rule)

        def gradient(self, logits: Tensor, choices: Tensor, dweights: Tensor, rule: Any) -> Tensor:
            dweights.data_ptr()
            leaf = logits.detach().requires_grad_()
            with torch.enable_grad():
                y = choosing._composed(leaf, None, choices, rule)[1]
            (found,) = torch.autograd.grad(y, leaf, dweights)
            return found

    monkeypatch.setattr(choosing, "choosers_for", lambda *_: Choosers())
    logits = torch.randn(M, 6, requires_grad=True)
    weights = ot.choose_experts(logits, 2).weights
    many = torch.randn(3, M, 2)
    (batched,) = torch.autograd.grad(weights, logits, many, is_grads_batched=True, retain_graph=True)
    one_by_one = [torch.autograd.grad(weights, logits, dy, retain_graph=True)[0] for dy in many]
    # 16 roundings to fp32 of an entry: two times 6 terms of a sum in two orders, and the functions of its terms
    torch.testing.assert_close(batched, torch.stack(one_by_one), rtol=16 * ROUNDING, atol=ROUNDING)
