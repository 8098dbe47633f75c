"""MoE.explain: who runs what, what is read where the tokens stand, and the route to other ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from moe_layers import REFERENCE
from torch import Tensor

from octavo import MXFP8, NVFP4, BlockScaling, CurrentScaling, DelayedScaling, RowScaling
from octavo_torch import Exchange, GroupedMLP, MoE, add_lora, observe
from octavo_torch.arithmetic import operators
from octavo_torch.moe import moe
from octavo_torch.moe.rows.moves import Moves, MoveSet

T, E, C, K, F, N = 20, 4, 2, 64, 48, 80
LAYERS: dict[str, dict[str, Any]] = {
    "bf16": {"recipe": None},
    "bf16, keep_all": {"recipe": None, "form": "keep_all"},
    "bf16, bias": {"recipe": None, "bias": True},
    "mxfp8": {"recipe": MXFP8()},
    "mxfp8, keep_all": {"recipe": MXFP8(), "form": "keep_all"},
    "mxfp8, bias": {"recipe": MXFP8(), "bias": True},
    "wgrad in bf16": {"recipe": MXFP8(wgrad="high_precision")},
    "wgrad in bf16, keep_all": {"recipe": MXFP8(wgrad="high_precision"), "form": "keep_all"},
    "fprop in bf16": {"recipe": MXFP8(fprop="high_precision")},
    "fprop in bf16, keep_all": {"recipe": MXFP8(fprop="high_precision"), "form": "keep_all"},
    "dgrad in bf16": {"recipe": MXFP8(dgrad="high_precision")},
    "delayed, fprop in bf16": {"recipe": DelayedScaling(fprop="high_precision")},
    "nvfp4, lean": {"recipe": NVFP4(), "form": "lean"},
}


def layer(**options: Any) -> MoE:
    """A small one of the reference backend."""
    return MoE(E, K, F, C, N, **{"dtype": torch.bfloat16, "backend": REFERENCE, "seed": 3, **options})


def tokens() -> Tensor:
    """[T, K] that take a gradient."""
    return torch.randn(T, K, dtype=torch.bfloat16, requires_grad=True)


@pytest.fixture
def widths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The columns of every array of which a layer writes rows."""
    seen: list[int] = []
    move_set_for = moe.move_set_for

    def counted(moves: Moves) -> Moves:
        def permute_rows(values: Tensor, *rest: Any) -> Tensor:
            seen.append(values.shape[1])
            return moves.permute_rows(values, *rest)

        return moves._replace(permute_rows=permute_rows)

    def counting(*layer: Any) -> MoveSet:
        moves = move_set_for(*layer)
        parts = {name: counted(getattr(moves, name)) for name in ("tokens", "results", "weights")}
        return moves._replace(**parts)

    monkeypatch.setattr(moe, "move_set_for", counting)
    return seen


@pytest.mark.parametrize("name", LAYERS)
def test_rows_are_written_where_it_says_so(name: str, widths: list[int]) -> None:
    """Each line on tokens against what a forward and backward write, and why fprop's rows are written."""
    module, x = layer(**LAYERS[name]), tokens()
    said = dict(module.explain(x).tokens)
    y = module(x)
    forward = list(widths)
    widths.clear()
    y.sum().backward()
    written = {"x in fprop": K in forward, "x in wgrad": K in widths, "dy": N in widths}
    for what, writes in written.items():
        assert ("rows are permuted" in said[what]) == writes, (what, said[what])
    assert ("fprop reads them in high precision" in said["x in fprop"]) == ("fprop" in name)


@pytest.fixture
def quantized(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The shape of every array that the reference backend quantizes."""
    seen: list[list[int]] = []
    quantize = operators.quantize_planes

    def counting(x: Tensor, *rest: Any) -> Any:
        seen.append(list(x.shape))
        return quantize(x, *rest)

    monkeypatch.setattr(operators, "quantize_planes", counting)
    return seen


@pytest.mark.parametrize(
    ("options", "x_once", "dy_once"),
    [
        ({"recipe": MXFP8()}, True, True),
        ({"recipe": BlockScaling(), "form": "lean"}, True, True),
        ({"recipe": RowScaling(), "form": "recompute"}, True, True),
        ({"recipe": BlockScaling(), "form": "keep_all"}, False, True),
        ({"recipe": BlockScaling(wgrad="high_precision")}, True, True),
        ({"recipe": BlockScaling(dgrad="high_precision")}, True, False),
        ({"recipe": CurrentScaling()}, False, False),
        ({"recipe": NVFP4()}, False, False),
    ],
    ids=["mxfp8", "block-lean", "row-recompute", "block-keep_all", "wgrad", "dgrad", "current", "nvfp4"],
)
def test_tokens_are_quantized_once_where_it_says_so(
    options: dict[str, Any], x_once: bool, dy_once: bool, quantized: list[list[int]]
) -> None:
    """Where a row's codes are its token's, products gather these, and no code of a row is written: of x, of which a
    form keeps columns in the same pass, and of dy, whose columns come by row. Not where a scale or a random bit is
    shared by rows."""
    module, x = layer(**options), tokens()
    said = dict(module.explain(x).tokens)
    y = module(x)
    assert ("quantizes each token once" in said["x in fprop"]) == x_once
    assert ([1, T, K] in quantized) == x_once
    assert ([T * C, K] in quantized) != x_once
    quantized.clear()
    y.sum().backward()
    assert ("quantizes each token once" in said["dy"]) == dy_once
    assert ([1, T, N] in quantized) == dy_once


def test_nothing_changes() -> None:
    """No seed is drawn: buffers and bits are those of a layer that was not asked."""
    asked, other = layer(recipe=NVFP4()), layer(recipe=NVFP4())
    other.load_state_dict(asked.state_dict())
    x = tokens()
    asked.explain(x.view(4, -1, K))
    assert all(torch.equal(a, b) for a, b in zip(asked.buffers(), other.buffers(), strict=True))
    assert torch.equal(asked(x), other(x))


def test_each_operation_has_a_backend_or_a_reason() -> None:
    """The experts' plan is a GroupedMLP's, torch routes where no backend does, and the lean form has codes."""
    report = layer(recipe=MXFP8(), form="lean").explain(tokens())
    rows = torch.randn(T, K, dtype=torch.bfloat16, requires_grad=True)
    experts = GroupedMLP(E, K, F, N, recipe=MXFP8(), dtype=torch.bfloat16, backend=REFERENCE)
    text = str(report)
    assert str(experts.explain(rows, [T, 0, 0, 0])) in text
    assert [part.operation for part in report.moves] == ["route", "permute_rows", "combine_rows"]
    for part in (report.router, *report.moves):
        assert part.backend == ""
        assert f"no backend serves {part.operation}; torch-reference: serves" in part.why
    assert 'torch-reference quantizes it for backward: form is "lean"' in text
    assert report.exchange is None


def test_what_reads_rows_is_named() -> None:
    """An observer and adapters read rows, which a layer without them does not write."""
    module, x = layer(recipe=MXFP8()), tokens()
    with observe(module):
        watched = dict(module.explain(x).tokens)
    assert watched["x in fprop"] == watched["dy"] == "rows are permuted first: an observer reads them"
    add_lora(module, 4, alpha=8.0)
    ((what, how),) = module.explain(x).tokens
    assert what == "x and dy"
    assert "the layer has adapters" in how


def test_tokens_that_do_not_fit() -> None:
    """Raises as forward does."""
    with pytest.raises(ValueError, match=r"x is .*; give tokens \[\.\.\., 64\]"):
        layer(recipe=None).explain(torch.randn(T, K + 1))
    with pytest.raises(ValueError, match="x has dtype float32 and w1 bfloat16"):
        layer(recipe=None).explain(torch.randn(T, K))


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """This process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def test_the_route_to_other_ranks(group: dist.ProcessGroup) -> None:
    """Why it is the collective; and of peer memory, which is up to the ranks, that the first forward finds out, without
    a message between them, and after it what was found."""
    report = layer(recipe=MXFP8(), ep=group).explain(tokens())
    assert report.exchange is not None
    assert report.exchange.route == "collective"
    assert "peer memory needs buffers of a fixed size: give Exchange(rows=)" in str(report)
    module = layer(recipe=MXFP8(), ep=group, exchange=Exchange(rows=T * C, route="peer"))
    assert "if each of 1 ranks reaches that of the others; the first forward finds out" in str(module.explain(tokens()))
    module(tokens())
    assert "peer memory, because each of the 1 ranks reaches that of the others" in str(module.explain(tokens()))
