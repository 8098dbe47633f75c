"""octavo_torch.adapters.torchtitan inside torchtitan: its override, its seam, one compiled graph."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import octavo
from octavo_torch.adapters.grouped_mm import AdapterError, GroupedMM

INSTALLED = find_spec("torchtitan") is not None
needs_torchtitan = pytest.mark.skipif(
    not INSTALLED, reason="torchtitan is not installed; `nox -s adapters` installs it"
)
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own, which torchtitan imports

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
