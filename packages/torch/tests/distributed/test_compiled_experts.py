"""torch.compile around experts that are spread over ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from moe_layers import REFERENCE, assert_equal
from torch import Tensor

from octavo_torch import MoE, add_lora
from octavo_torch.moe.parallel.group import ExpertGroup


def layers() -> tuple[MoE, MoE]:
    """The same layer over one rank and without ranks."""
    both = [MoE(4, 64, 32, 2, recipe="mxfp8", backend=REFERENCE, ep=ep) for ep in (dist.ProcessGroup(0, 1), None)]
    both[1].load_state_dict(both[0].state_dict())
    return both[0], both[1]


# torch hides it where it looks at what a function outside of the graph is given
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("adapted", [False, True])
def test_the_exchange_runs_beside_the_graph(adapted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it is traced, which took a minute; the bits are those of eager, gradients too."""
    traced: list[bool] = []

    def all_to_all(self: Any, what: str, rows: Tensor, *shares: Any) -> Tensor:
        traced.append(torch.compiler.is_compiling())
        return rows.contiguous().clone()  # of one rank

    monkeypatch.setattr(ExpertGroup, "all_to_all", all_to_all)
    torch._dynamo.reset()
    spread, alone = layers()
    for layer in (spread, alone):
        if adapted:
            torch.manual_seed(0)
            add_lora(layer, 16)
    x = torch.randn(3, 64)
    y, expected = torch.compile(spread, backend="eager")(x), alone(x)
    y.sum().backward()
    expected.sum().backward()
    assert traced
    assert not any(traced)
    grads = [[p.grad for p in layer.parameters() if p.grad is not None] for layer in (spread, alone)]
    assert_equal([y, *grads[0]], [expected, *grads[1]])


@pytest.mark.parametrize("adapted", [False, True])
def test_a_whole_graph_is_refused(adapted: bool) -> None:
    """With fullgraph=True, and by torch.export: the sentence says what to do."""
    torch._dynamo.reset()
    layer, _ = layers()
    if adapted:
        add_lora(layer, 16)
    x, said = torch.randn(3, 64), r"a traced graph holds no exchange between ranks; call the layer outside of what"
    with pytest.raises(Exception, match=said):
        torch.compile(layer, backend="eager", fullgraph=True)(x)
    with pytest.raises(ValueError, match=said):
        torch.export.export(layer, (x,), strict=False)
