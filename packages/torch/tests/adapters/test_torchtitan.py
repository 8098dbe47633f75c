"""octavo_torch.adapters.torchtitan inside torchtitan: its override, its seam, one compiled graph."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rank_work import titan as titan_work
from torch import Tensor

import octavo
import octavo_torch
from octavo_torch.adapters.grouped_mm import AdapterError, GroupedMM

INSTALLED = find_spec("torchtitan") is not None
needs_torchtitan = pytest.mark.skipif(
    not INSTALLED, reason="torchtitan is not installed; `nox -s adapters` installs it"
)
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of torch's own, which torchtitan imports
    pytest.mark.filterwarnings("ignore:In CPU autocast"),  # its router asks for fp32
]

E, D, F, R = 3, 32, 48, 24
COUNTS = [9, 0, 12]


def test_the_recorded_call(backend: str | None, rng: np.random.Generator) -> None:
    """`_grouped_mm(A=, B_t=, offs=)`: transposed views of bf16 weights, int32 ends on the device, rows past them."""
    product = GroupedMM("block", backend=backend)
    a = torch.randn(R, D).bfloat16().requires_grad_()
    w = torch.randn(E, F, D).bfloat16().requires_grad_()
    ends = torch.tensor(COUNTS).cumsum(0, dtype=torch.int32)
    y = product(a, w.transpose(-2, -1), ends)
    expected = GroupedMM(None, backend=backend)(a, w.transpose(-2, -1), ends)
    dy = torch.randn(R, F).bfloat16()
    for ours, theirs in zip(torch.autograd.grad(y, (a, w), dy), torch.autograd.grad(expected, (a, w), dy), strict=True):
        # E4M3 rounds each operand by up to 2^-4
        assert torch.linalg.vector_norm((ours - theirs).float()) <= 2.0**-3 * torch.linalg.vector_norm(theirs.float())
    assert not y[int(ends[-1]) :].any()


@pytest.mark.skipif(INSTALLED, reason="torchtitan is installed")
def test_without_torchtitan() -> None:
    """The import says what to install."""
    with pytest.raises(AdapterError, match=r"torchtitan is not installed .* pip install torchtitan==0\.3\.0"):
        import octavo_torch.adapters.torchtitan  # noqa: F401


def built(config: Any) -> Any:
    experts = config.build()
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(std=0.2)
    return experts


def apply(arguments: dict[str, Any]) -> Any:
    """A configuration of experts after torchtitan has applied the override named in its own options."""
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
    from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

    config = RoutedExperts.Config(
        inner_experts=GroupedExperts.Config(dim=D, hidden_dim=F, num_experts=E),
        token_dispatcher=LocalTokenDispatcher.Config(num_experts=E, top_k=1),
    )
    (line,) = apply_overrides(OverrideConfig(imports=[(OVERRIDE, arguments)]), config)
    assert "GroupedExperts.Config ->" in line
    return config.inner_experts


OVERRIDE = "octavo_torch.adapters.torchtitan.grouped_experts"


@needs_torchtitan
def test_the_override(backend: str | None, rng: np.random.Generator) -> None:
    """torchtitan's door for vendors: its parameters and keys, three products of ours a forward, our gradients."""
    config = apply({"recipe": "mxfp8", "backend": backend})
    ours = built(config)
    assert type(ours).__name__ == "OctavoGroupedExperts"
    assert list(ours.state_dict()) == ["w1_EFD", "w2_EDF", "w3_EFD"]
    x = torch.randn(R, D).requires_grad_()
    y = ours(x, torch.tensor(COUNTS))
    product = GroupedMM(octavo.MXFP8(), backend=backend)
    weights = [w.bfloat16().transpose(-2, -1) for w in (ours.w1_EFD, ours.w3_EFD, ours.w2_EDF)]
    ends = torch.tensor(COUNTS).cumsum(0, dtype=torch.int32)
    h = torch.nn.functional.silu(product(x.bfloat16(), weights[0], ends)) * product(x.bfloat16(), weights[1], ends)
    expected = product(h, weights[2], ends).type_as(x)
    assert torch.equal(y, expected)
    dy = torch.randn(R, D)
    leaves = (x, *ours.parameters())
    grads: list[tuple[Tensor, ...]] = [torch.autograd.grad(one, leaves, dy) for one in (y, expected)]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@needs_torchtitan
@pytest.mark.parametrize(
    ("arguments", "error"),
    [({"recipe": "delayed"}, "takes its scales from history"), ({"recipe": "no such"}, "no such")],
)
def test_arguments_are_checked_where_they_are_given(arguments: dict[str, Any], error: str) -> None:
    """Before a model is built."""
    with pytest.raises(Exception, match=error):
        apply(arguments)


@needs_torchtitan
def test_one_compiled_graph_and_a_trace(backend: str | None, rng: np.random.Generator) -> None:
    """The seam has to be traceable: torch.compile without a break, and make_fx, which sees our operators."""
    from torch.fx.experimental.proxy_tensor import make_fx

    ours = built(apply({"recipe": octavo.MXFP8().to_json(), "backend": backend}))
    x = torch.randn(R, D)
    expected = ours(x, torch.tensor(COUNTS))
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, torch.tensor(COUNTS)), expected)
    a, w = x.bfloat16(), ours.w1_EFD.detach().bfloat16()

    def seam(a: Tensor, w: Tensor, ends: Tensor) -> Tensor:
        return ours._grouped_mm(A=a, B_t=w.transpose(-2, -1), offs=ends)

    ends = torch.tensor(COUNTS).cumsum(0, dtype=torch.int32)
    traced = make_fx(seam, tracing_mode="fake")(a, w, ends)
    others = torch.tensor([0, R, R], dtype=torch.int32)
    assert torch.equal(traced(a, w, others), seam(a, w, others))
    assert any("octavo" in str(node.target) for node in traced.graph.nodes)


def _away_from_the_clamp(experts: Any) -> None:
    """Two fifths of fc1's results, gate and up, far past the limit of 7 on either side, the others far inside.

    Its slope is 1 on one side of the limit and 0 on the other, so a result within a rounding of it makes two layers
    that round in different places differ by all of a feature's gradient: in 6 of 200 draws.
    """
    experts.mlp1_weight_EGD /= 3
    experts.mlp1_bias_EG[:, ::5], experts.mlp1_bias_EG[:, 1::5] = 14, -14


def layers(arguments: dict[str, Any], gpt_oss: bool = False) -> tuple[Any, Any]:
    """torchtitan's MoE layer with `routed_experts`, and without, from the same parameters."""
    made = [titan_work.config_of(how, gpt_oss=gpt_oss, shared=not gpt_oss).build() for how in (arguments, None)]
    with torch.no_grad():
        for parameter in made[0].parameters():
            parameter.normal_(std=0.3)
        if gpt_oss:
            _away_from_the_clamp(made[0].routed_experts.inner_experts)
    made[1].load_state_dict(made[0].state_dict())  # the same names
    return made[0], made[1]


@needs_torchtitan
@pytest.mark.parametrize("gpt_oss", [False, True], ids=["gated", "gpt-oss"])
def test_routed_experts_compute_what_torchtitans_do(gpt_oss: bool, rng: np.random.Generator) -> None:
    """In high precision, both in bf16: the result and every gradient, the router's among them."""
    ours, theirs = layers({"recipe": "bf16"}, gpt_oss)
    x, dy = torch.randn(2, 7, titan_work.D), torch.randn(2, 7, titan_work.D)
    if gpt_oss:  # torchtitan's takes no other tokens
        ours, theirs, x, dy = (value.bfloat16() for value in (ours, theirs, x, dy))
    found = []
    for layer in (ours, theirs):
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        found.append([y, *torch.autograd.grad(y, (leaf, *layer.parameters()), dy)])
    for one, other in zip(*found, strict=True):
        # torchtitan rounds between its operations to bf16, by up to 2^-9 each
        assert torch.linalg.vector_norm(one - other) <= 2.0**-6 * torch.linalg.vector_norm(other)


@needs_torchtitan
def test_routed_experts_are_compiled_and_converted(rng: np.random.Generator) -> None:
    """In one process one graph, as torchtitan asks for; over ranks a refusal that says what to do; another recipe."""
    routed = layers({"recipe": "mxfp8"})[0].routed_experts
    x = torch.randn(2, 7, titan_work.D)
    scores, choices = torch.rand(2, 7, 8).topk(titan_work.C)
    given = (x, scores, choices, torch.bincount(choices.flatten(), minlength=8))
    expected = routed(*given)
    assert torch.equal(torch.compile(routed, fullgraph=True, backend="aot_eager")(*given), expected)
    other = layers({"recipe": "fp8-current"})[0].routed_experts
    other.load_state_dict(routed.state_dict())
    assert octavo_torch.convert(routed, "fp8-current", backend="torch-reference") == ("inner_experts",)
    assert torch.equal(routed(*given), other(*given))
    assert not torch.equal(routed(*given), expected)
    torch.compiler.reset()
    routed.ep, routed.inner_experts.num_experts = SimpleNamespace(size=lambda: 2), 16
    with pytest.raises(Exception, match=r"traces experts of 2 ranks.* leave the model out of compile\.components"):
        torch.compile(routed, fullgraph=True, backend="eager")(*given)


@needs_torchtitan
@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"recipe": "delayed"}, "takes its scales from history"),
        ({"recipe": "mxfp8", "form": "fast"}, "form is 'fast'"),
        ({"recipe": "mxfp8", "exchange": {"ranks": 2}}, "give an object of payload, returns, rows and pair_rows"),
        ({"recipe": "mxfp8", "exchange": {"payload": "nvfp4"}}, "has no scales of single rows"),
    ],
)
def test_arguments_of_routed_experts(arguments: dict[str, Any], error: str) -> None:
    """Before a model is built."""
    with pytest.raises(ValueError, match=error):
        titan_work.config_of(arguments)


@needs_torchtitan
def test_one_override_at_a_time() -> None:
    """torchtitan refuses two that replace parts of each other."""
    from torchtitan.config.override import OverrideConfig, apply_overrides

    both = [(name, {"recipe": "mxfp8"}) for name in (OVERRIDE, titan_work.OVERRIDE)]
    with pytest.raises(ValueError, match="an ancestor of"):
        apply_overrides(OverrideConfig(imports=both), titan_work.config_of(None))


@needs_torchtitan
def test_experts_that_compute_otherwise() -> None:
    """Another converter's product, another limit of the clamp, and parameters that FSDP has not gathered are told."""
    from octavo_torch.adapters.torchtitan import grouped_experts, routed_experts

    config = titan_work.config_of(None).routed_experts
    config.inner_experts = grouped_experts(config.inner_experts, recipe="mxfp8")
    with pytest.raises(
        ValueError, match="OctavoGroupedExperts, whose forward or product is its own; routed_experts tak"
    ):
        routed_experts(config, recipe="mxfp8")
    config = titan_work.config_of(None, gpt_oss=True).routed_experts
    config.inner_experts.swiglu_limit = 5.0
    with pytest.raises(ValueError, match=r"swiglu_limit is 5\.0 and clamped_swiglu's 7\.0"):
        routed_experts(config, recipe="mxfp8")
    routed = titan_work.config_of({"recipe": "mxfp8"}, gpt_oss=True).build().routed_experts
    dims = SimpleNamespace(tp=2, tp_enabled=True, get_optional_mesh=lambda name: None)
    with pytest.raises(ValueError, match="tensor parallelism of 2 ranks splits experts with biases"):
        routed.parallelize(dims)
    layer = layers({"recipe": "mxfp8"})[0]
    with torch.no_grad():
        layer.routed_experts.inner_experts.w2_EDF.set_(torch.randn(4, titan_work.D, titan_work.F))
    with pytest.raises(ValueError, match="w2_EDF has 4 experts here and 1 rank share 8; gather them"):
        layer(torch.randn(2, 7, titan_work.D))
