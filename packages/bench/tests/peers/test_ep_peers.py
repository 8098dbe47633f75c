"""MoE layers of others over several processes: gradients in our order, what a stand-in of LigerCute is given, and what
is said of a peer that is absent or wrong."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import silu

from octavo_bench.ep.peers import LIGER, TORCH, check_close, finish, peer_call
from octavo_bench.errors import AbsentError

ADAPTER = "octavo_bench.peers.liger_cute"
TOKENS, K, F, EXPERTS, TOP = 32, 48, 40, 4, 2


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def layer(seed: int) -> dict[str, Any]:
    """Leaves, choices with as many rows for every expert, and the gradient of the result."""
    draw = torch.Generator().manual_seed(seed)

    def leaf(*sides: int) -> Tensor:
        return (torch.randn(sides, generator=draw) * sides[-1] ** -0.5).bfloat16().requires_grad_()

    weights = torch.rand(TOKENS, TOP, generator=draw).requires_grad_()
    return {
        "leaves": [leaf(TOKENS, K), leaf(EXPERTS, 2 * F, K), leaf(EXPERTS, K, F), weights],
        "choices": torch.arange(TOKENS * TOP).view(TOKENS, TOP) % EXPERTS,
        "dy": torch.randn(TOKENS, K, generator=draw).bfloat16(),
    }


def expected(layer: dict[str, Any]) -> tuple[Tensor, ...]:
    """Token by token in float64."""
    leaves = [leaf.detach().double().requires_grad_() for leaf in layer["leaves"]]
    x, w1, w2, weights = leaves
    rows = []
    for token, experts in enumerate(layer["choices"].tolist()):
        parts = []
        for place, expert in enumerate(experts):
            gate, up = (w1[expert] @ x[token]).chunk(2)
            parts.append(weights[token, place] * (w2[expert] @ (silu(gate) * up)))
        rows.append(torch.stack(parts).sum(0))
    return torch.autograd.grad(torch.stack(rows), leaves, layer["dy"].double())


def liger(calls: dict[str, Any]) -> dict[str, ModuleType]:
    """Stand-ins of the two packages: the layer composed of torch's operations, and what the runtime is told."""

    def moe_fused(
        x: Tensor, index: Tensor, weights: Tensor, gate: Tensor, up: Tensor, down: Tensor, *more: int
    ) -> Tensor:
        calls["moe_fused"] = (index.dtype, gate.is_contiguous(), *more)
        a = silu(torch.einsum("tk,tcfk->tcf", x, gate[index])) * torch.einsum("tk,tcfk->tcf", x, up[index])
        return (torch.einsum("tcf,tckf->tck", a, down[index]) * weights[..., None].to(x.dtype)).sum(1)

    names = ("liger_cute_kernels", "liger_cute_kernels.nvshmem", "liger_kernel", "liger_kernel.ops")
    names += ("liger_kernel.ops.cute", "liger_kernel.ops.cute.ops", "liger_kernel.ops.cute.ops.moe")
    modules: dict[str, Any] = {name: ModuleType(name) for name in names}
    cute = modules["liger_cute_kernels"]
    cute.nvshmem = modules["liger_cute_kernels.nvshmem"]
    cute.nvshmem.finalize = lambda: calls.update(finalized=True)
    cute.MoEConfig = dict
    cute.configure = lambda **given: calls.update(configured=given["moe"])
    modules["liger_kernel.ops.cute.ops.moe"].moe_fused = moe_fused
    return modules


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What LigerCute's stand-in was told; the adapter is imported anew, and forgotten afterwards."""
    found: dict[str, Any] = {}
    monkeypatch.delitem(sys.modules, ADAPTER, raising=False)
    for name, module in liger(found).items():
        monkeypatch.setitem(sys.modules, name, module)
    for function in ("current_device", "synchronize"):
        monkeypatch.setattr(torch.cuda, function, lambda: 0)
    for name in ("NVSHMEM_REMOTE_TRANSPORT", "NVSHMEM_DISABLE_NVLS"):
        monkeypatch.setenv(name, "kept")
    yield found
    sys.modules.pop(ADAPTER, None)


@pytest.mark.usefixtures("one_rank", "calls")
@pytest.mark.parametrize("name", [TORCH, LIGER])
def test_gradients_are_of_our_leaves(name: str, layer: dict[str, Any]) -> None:
    """Of tokens, both weights with the gate half first, and choices' weights, as float64 has them."""
    check_close(name, peer_call(name, layer["leaves"], layer["choices"], layer["dy"], EXPERTS)(), expected(layer))


@pytest.mark.usefixtures("one_rank")
def test_ligercute_is_told_the_problem(layer: dict[str, Any], calls: dict[str, Any]) -> None:
    """Capacities of this very problem on one host, int32 choices, contiguous halves; and when to end its runtime."""
    peer_call(LIGER, layer["leaves"], layer["choices"], layer["dy"], EXPERTS)()
    assert calls["configured"] == {
        "max_tokens": TOKENS, "hidden_size": K, "num_experts": EXPERTS, "top_k": TOP,
        "num_hosts": 1, "gpus_per_host": 1,
    }  # fmt: skip
    assert calls["moe_fused"] == (torch.int32, True, EXPERTS, TOP)
    finish()
    assert calls["finalized"]


def test_an_absent_library_is_said(layer: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """With its name and the reason, for the notes."""
    monkeypatch.delitem(sys.modules, ADAPTER, raising=False)
    monkeypatch.setitem(sys.modules, "liger_cute_kernels", None)
    with pytest.raises(AbsentError, match="LigerCute is not measured: it is not installed"):
        peer_call(LIGER, layer["leaves"], layer["choices"], layer["dy"], EXPERTS)


def test_a_wrong_gradient_does_not_count(layer: dict[str, Any]) -> None:
    """One of four that is a tenth too large, and one that has a NaN."""
    right = expected(layer)
    check_close(TORCH, right, right)
    with pytest.raises(ValueError, match=r"differ from ours by 10.0%, so its time does not count"):
        check_close(TORCH, (*right[:3], 1.1 * right[3]), right)
    with pytest.raises(ValueError, match="differ from ours by nan%"):
        check_close(TORCH, (*right[:3], torch.full_like(right[3], torch.nan)), right)
