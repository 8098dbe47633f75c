"""A router by the kernels: the composed one's choices, weights and gradients within their bounds, however it runs."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import octavo_numerics
import octavo_registry
from octavo_torch import Choice, choose_experts

T, E, K = 45, 24, 5
REFERENCE, NATIVE = "torch-reference", "torch-native"
RULES: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax, as it is": {"renormalize": False},
    "sigmoid in groups": {"score": "sigmoid", "groups": 4, "kept_groups": 2, "scale": 2.5},
    "sqrtsoftplus": {"score": "sqrtsoftplus"},
}
DEVICES = (
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")),
)


def draw(device: str) -> Tensor:
    """Logits in steps of a sixteenth, of which many tie; rows that lie apart."""
    return (torch.randint(0, 64, (T, E + 3), device=device) / 16)[:, :E].requires_grad_()


def rule_of(name: str) -> octavo_numerics.RouterRule:
    """The definition's form."""
    return octavo_numerics.RouterRule(K, **RULES[name])


def array(tensor: Tensor) -> np.ndarray:
    """On the host."""
    return tensor.detach().cpu().numpy()


def assert_alike(made: Choice, composed: Choice, logits: Tensor, name: str) -> None:
    """Equal choices and counts, weights twice their bound apart at most."""
    assert torch.equal(made.choices, composed.choices)
    assert torch.equal(made.counts, composed.counts)
    defined = octavo_numerics.choose_experts(array(logits), rule_of(name), None, array(composed.choices))
    bound = octavo_numerics.choice_weights_bound(array(logits), defined, rule_of(name))
    for weights in (made.weights, composed.weights):
        assert (np.abs(array(weights) - defined.weights) <= bound).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", RULES)
def test_kernels_choose_as_torch_does(name: str, device: str, rng: np.random.Generator) -> None:
    """With a bias, replayed, and both ways' gradients within the definition's bound; the same bits each time."""
    logits = draw(device)
    bias = torch.randint(-2, 3, (E,), device=device) * 0.5 if "groups" not in RULES[name] else None
    replay = torch.randint(-1, E + 1, (T, K), dtype=torch.int32, device=device)
    dweights = torch.randn(T, K, device=device)
    for given in ({}, {"bias": bias}, {"replay": replay}):
        made, again, composed = (
            choose_experts(logits, K, **RULES[name], **given, backend=backend)
            for backend in (NATIVE, NATIVE, REFERENCE)
        )
        assert all(torch.equal(one, other) for one, other in zip(made, again, strict=True))
        assert_alike(made, composed, logits, name)
        shown = array(logits), array(made.choices), array(dweights), rule_of(name)
        exact, bound = octavo_numerics.choose_gradient(*shown), octavo_numerics.choose_gradient_bound(*shown)
        for choice in (made, composed):
            (gradient,) = torch.autograd.grad(choice.weights, logits, dweights)
            assert (np.abs(array(gradient) - exact) <= bound + np.abs(exact) * 2.0**-24).all()


def test_who_serves_it_and_why_not() -> None:
    """Past what a warp holds the router is composed, and the registry has the reason."""
    request: Any = partial(
        octavo_registry.Request, op="choose_experts", framework="torch", device="cpu", in_dtype="float32",
        out_dtype="float32",
    )  # fmt: skip
    assert octavo_registry.plan(request(groups=1024, choices=32)).backend == NATIVE
    reasons = {each.backend: each.reason for each in octavo_registry.explain(request(groups=1025))}
    assert "there are 1025 experts, and its kernels, which give each token a warp, hold 1024" in reasons[NATIVE]
    logits = torch.randn(3, 1025)
    one, other = (choose_experts(logits, 2, backend=backend) for backend in (NATIVE, REFERENCE))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # torch's own rules of forward mode
def test_other_ways_to_differentiate(rng: np.random.Generator) -> None:
    """A second derivative, torch.func.grad and a tangent of forward mode: torch's operations have rules for them."""
    logits, direction = draw("cpu"), torch.randn(T, E)

    def loss(logits: Tensor, backend: str) -> Tensor:
        return choose_experts(logits, K, backend=backend).weights.square().sum()

    def second(backend: str) -> Tensor:
        (first,) = torch.autograd.grad(loss(logits, backend), logits, create_graph=True)
        return torch.autograd.grad((first * direction).sum(), logits)[0]

    for run in (second, lambda backend: torch.func.grad(partial(loss, backend=backend))(logits.detach())):
        torch.testing.assert_close(run(NATIVE), run(REFERENCE))
    tangents = [
        torch.func.jvp(partial(loss, backend=one), (logits.detach(),), (direction,)) for one in (NATIVE, REFERENCE)
    ]
    torch.testing.assert_close(tangents[0], tangents[1])


def test_a_compiled_router_has_the_bits_of_an_eager_one(rng: np.random.Generator) -> None:
    """One graph, in which the kernels are operators: recompute and torch.compile choose alike."""
    logits, bias = draw("cpu"), torch.rand(E)

    def run(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        choice = choose_experts(logits, K, score="sigmoid", bias=bias, backend=NATIVE)
        return choice.choices, choice.weights * 2, choice.counts

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for one, other in zip(compiled(logits), run(logits), strict=True):
        assert torch.equal(one, other)
    gradients = [torch.autograd.grad(function(logits)[1].square().sum(), logits)[0] for function in (compiled, run)]
    assert torch.equal(*gradients)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_a_graph_replays_other_tokens(rng: np.random.Generator) -> None:
    """Captured once, both ways: other logits, with the bits of an eager call, and nothing is read back."""
    static, dweights = draw("cuda"), torch.randn(T, K, device="cuda")

    def run(logits: Tensor) -> tuple[Tensor, ...]:
        choice = choose_experts(logits, K, backend=NATIVE)
        return *choice, torch.autograd.grad(choice.weights, logits, dweights)[0]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = run(static)
    for _ in range(20):
        logits = draw("cuda")
        with torch.no_grad():
            static.copy_(logits)
        graph.replay()
        assert all(torch.equal(one, other) for one, other in zip(captured, run(logits), strict=True))
