"""octavo_torch.adapters.automodel: its recorded interface, and inside NeMo Automodel where that is installed."""

from __future__ import annotations

import sys
import warnings
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import octavo
from octavo_torch.adapters.automodel import select_grouped_mm, using
from octavo_torch.adapters.grouped_mm import AdapterError, GroupedMM

INSTALLED = find_spec("nemo_automodel") is not None
needs_automodel = pytest.mark.skipif(
    not INSTALLED, reason="nemo-automodel is not installed; `nox -s adapters` installs it"
)
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

T, D, INNER, E, CHOICES = 24, 32, 48, 4, 2


def test_the_recorded_call(backend: str | None, rng: np.random.Generator) -> None:
    """`select_grouped_mm(use_mxfp8)` returns f(A, B, offs) with B [E, K, N] as it lies and int32 ends."""
    select = select_grouped_mm(octavo.BlockScaling(), backend=backend)
    a, b = torch.randn(T, D).bfloat16(), torch.randn(E, D, INNER).bfloat16()
    ends = torch.tensor([5, 5, 16, 20], dtype=torch.int32)
    expected = GroupedMM("block", backend=backend)(a, b, ends)
    for asked in (True, False):
        assert torch.equal(select(asked)(a, b, ends), expected)
    assert not expected[20:].any()


@pytest.mark.skipif(INSTALLED, reason="nemo-automodel is installed")
def test_without_automodel() -> None:
    """The block is not entered, and the sentence says what to install."""
    with pytest.raises(AdapterError, match=r"pip install nemo-automodel==0\.7\.0"), using("mxfp8"):
        raise AssertionError


def test_a_block_in_which_nobody_asks_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts of another kind, and those with Automodel's adapters, run their own product all the same."""
    theirs = object()
    there = SimpleNamespace(select_grouped_mm=theirs)
    names = ("nemo_automodel", "nemo_automodel.components", "nemo_automodel.components.moe")
    for name in names:
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(experts=there))
    with pytest.warns(UserWarning, match="nothing has run in the recipe"), using("mxfp8"):
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with using("mxfp8"):
            assert there.select_grouped_mm(False).recipe == octavo.MXFP8()  # type: ignore[attr-defined]
        with pytest.raises(KeyError), using("mxfp8"):
            raise KeyError
    assert there.select_grouped_mm is theirs


def experts(kind: str) -> Any:
    from nemo_automodel.components.moe.config import MoEConfig
    from nemo_automodel.components.moe.experts import GroupedExperts

    config = MoEConfig(
        n_routed_experts=E, n_shared_experts=0, n_activated_experts=CHOICES, n_expert_groups=1, n_limited_groups=1,
        train_gate=True, gate_bias_update_factor=0.0, aux_loss_coeff=0.0, score_func="softmax", route_scale=1.0,
        dim=D, inter_dim=INNER, moe_inter_dim=INNER, norm_topk_prob=True, dtype=torch.bfloat16,
        expert_activation="relu2", expert_bias=kind == "bias",
    )  # fmt: skip
    made = GroupedExperts(config, SimpleNamespace(experts="torch_mm", compile_router_weight=False))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.2)
    return made


@needs_automodel
@pytest.mark.parametrize("kind", ["plain", "bias"])
def test_inside_automodel(kind: str, backend: str | None, rng: np.random.Generator) -> None:
    """Its experts with and without biases run the recipe in the block and torch's product outside, gradients too."""
    module = experts(kind)
    x = torch.randn(T, D).bfloat16().requires_grad_()
    index = torch.tensor(np.stack([rng.permutation(E)[:CHOICES] for _ in range(T)]))
    weights, mask = torch.rand(T, CHOICES).requires_grad_(), torch.ones(T, dtype=torch.bool)
    dy = torch.randn(T, D)

    @torch.compiler.set_stance("force_eager")  # its activations are compiled functions
    def results() -> list[Tensor]:
        y = module(x, mask, weights, index)
        return [y.detach(), *torch.autograd.grad(y, (x, weights, *module.parameters()), dy)]

    with using(None, backend=backend):
        plain = results()
    try:
        theirs = results()
    except RuntimeError as error:  # torch's own product wants aligned groups
        assert "stride" in str(error) or "align" in str(error)  # noqa: PT017
        theirs = plain
    with using("block", backend=backend):
        ours = results()
    for high, low, own in zip(plain, ours, theirs, strict=True):
        norm = torch.linalg.vector_norm(own.float())
        assert torch.linalg.vector_norm((high - own).float()) <= 2.0**-6 * norm  # bf16 results, rounded once more
        assert torch.linalg.vector_norm((low - own).float()) <= 2.0**-2 * norm  # E4M3 rounds each operand by 2^-4
    assert not torch.equal(ours[0], plain[0])
