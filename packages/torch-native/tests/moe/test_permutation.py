"""permute and unpermute on the native kernels: the bits of torch's operations, wherever rows stand in memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import octavo_registry
from octavo_registry import MOVES, Request
from octavo_torch import permute, unpermute
from octavo_torch_native.moe import moves
from octavo_torch_native.plugin import CARD

T, C, G = 41, 3, 6
NATIVE, OWN = "torch-native", "torch-reference"


def draw_index(rng: np.random.Generator) -> Tensor:
    """Choices, some of them nobody's; expert 1 gets none."""
    index = rng.choice([0, 2, 3, 4, 5, -1, G], (T, C))
    return torch.from_numpy(index)


def results(x: Tensor, index: Tensor, w: Tensor, dy: Tensor, backend: str) -> list[Tensor]:
    """Rows, routing, y and gradients."""
    leaves = [value.detach().requires_grad_() for value in (x, w)]
    rows, sizes, routing = permute(leaves[0], index, G, backend=backend)
    probs = routing.to_rows(leaves[1], backend=backend)
    y = unpermute(rows, routing, leaves[1], backend=backend)
    plain = unpermute(rows, routing, backend=backend)
    grads = torch.autograd.grad([y, plain, probs], leaves, [dy, dy, torch.arange(T * C).float()])
    return [rows.detach(), sizes, routing.order, routing.position, routing.routed, probs.detach(), y, plain, *grads]


def test_the_card_declares_moves() -> None:
    """The registry gives them to this backend, in a CUDA graph too."""
    for op in sorted(MOVES):
        request = Request(
            op=op, framework="torch", device="cpu", in_dtype="bfloat16", out_dtype="bfloat16"
        )  # fmt: skip
        assert octavo_registry.plan(request, backend=NATIVE).run is getattr(moves, op)
    on_gpu = [row for row in CARD.capabilities if row.device == "cuda" and MOVES & row.ops]
    assert [row.graph_safe for row in on_gpu] == [True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [1, 24, 37])
def test_the_bits_of_torchs_operations(columns: int, dtype: torch.dtype, rng: np.random.Generator) -> None:
    """Rows, sums and their gradients bit for bit; the weights' gradient up to the order of a sum (faults.md 18, 61)."""
    x, dy = (torch.from_numpy(rng.standard_normal((T, columns))).to(dtype) for _ in range(2))
    given = x, draw_index(rng), torch.from_numpy(rng.random((T, C))).float(), dy
    made, expected = results(*given, NATIVE), results(*given, OWN)
    for ours, theirs in zip(made[:-1], expected[:-1], strict=True):
        assert torch.equal(ours, theirs)
    torch.testing.assert_close(made[-1], expected[-1])


def test_strided_operands(rng: np.random.Generator) -> None:
    """Rows that stand apart, transposed ones, an expanded gradient, choices of another integer type: equal bits."""
    index = draw_index(rng)
    wide = torch.from_numpy(rng.standard_normal((T, 40))).float()
    for x in (wide[:, :24], wide[:, 3:27], wide.T.contiguous().T):
        rows, _, routing = permute(x, index.T.contiguous().T.to(torch.int32), G, backend=NATIVE)
        expected, _, other = permute(x.contiguous(), index, G, backend=OWN)
        assert torch.equal(rows, expected)
        spread = torch.nn.functional.pad(rows, (0, 8))[:, : rows.shape[1]].requires_grad_()
        y = unpermute(spread, routing, backend=NATIVE)
        assert torch.equal(y, unpermute(expected, other, backend=OWN))
        (grad,) = torch.autograd.grad(y.sum(), spread)
        assert torch.equal(grad, routing.to_rows(torch.ones(T, C))[:, None].expand_as(grad))
        # rows and gradient at two different strides
        weights, dy = torch.rand(T, C, requires_grad=True), torch.randn(T, 3 * x.shape[1])[:, : x.shape[1]]
        made, wanted = (
            torch.autograd.grad(unpermute(own, places, weights, backend=backend), weights, dy)[0]
            for own, places, backend in ((spread.detach(), routing, NATIVE), (expected, other, OWN))
        )
        torch.testing.assert_close(made, wanted)


def test_compiled(rng: np.random.Generator) -> None:
    """One full graph with the bits of eager."""

    def call(x: Tensor, index: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        rows, _, routing = permute(x, index, G, backend=NATIVE)
        return unpermute(rows, routing, w, backend=NATIVE), routing.to_rows(w, backend=NATIVE)

    torch.compiler.reset()
    inputs = torch.randn(T, 24).requires_grad_(), draw_index(rng), torch.rand(T, C).requires_grad_()
    both = []
    for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        y, probs = function(*inputs)
        both.append([y, probs, *torch.autograd.grad([y.sum(), probs.sum()], (inputs[0], inputs[2]))])
    for ours, theirs in zip(*both, strict=True):
        assert torch.equal(ours, theirs)


def test_operators_pass_opcheck(rng: np.random.Generator) -> None:
    """Fake kernels against real metadata (faults.md 46)."""
    space, x, index = torch.ops.octavo_torch_native, torch.randn(T, 8), draw_index(rng)
    rows, _, routing = permute(x, index, G)
    order, position, routed = routing.order, routing.position, routing.routed
    for operator, arguments in (
        (space.route, (index, G)),
        (space.permute_rows, (x, order, position, routed, torch.rand(T, C))),
        (space.combine_rows, (rows, position, routed, None)),
        (space.dot_rows, (rows, x, position, routed)),
    ):
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


def test_many_groups_are_left_to_a_sort() -> None:
    """A GPU's route reads the choices once per group: past 1 024 torch's operations take over, for the reason told."""
    request = Request(
        op="route",
        framework="torch",
        device="cuda",
        arch=(9, 0),
        in_dtype="bfloat16",
        out_dtype="bfloat16",
        groups=1025,
    )
    (verdict,) = (row for row in octavo_registry.explain(request) if row.backend == NATIVE)
    assert "slower than a sort past 1024" in verdict.reason
