"""main_grad beside autograd: hooks, flags and gradients of no memory, recomputed and compiled calls, none asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from main_grad_calls import SIZES, G, K, N, backward, microbatch, parameter
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from octavo import PRESETS
from octavo_torch import GroupedLinear, grouped_linear


def test_get_main_grad_is_asked_in_backward_alone(rng: np.random.Generator) -> None:
    """It goes before main_grad, and may make the buffer late; afterwards weight.main_grad is that buffer, for hooks
    that look for it there, as Megatron-FSDP's do."""
    w, (x, dy) = parameter(), microbatch()
    late: list[Tensor] = []

    def get_main_grad() -> Tensor:
        late.append(torch.zeros(G, N, K))
        return late[-1]

    w.get_main_grad = get_main_grad  # type: ignore[attr-defined]
    other = w.main_grad = torch.zeros(G, N, K)  # type: ignore[attr-defined]
    seen: list[Tensor] = []
    w.register_post_accumulate_grad_hook(lambda p: seen.append(p.main_grad))  # type: ignore[attr-defined]
    y = grouped_linear(x, w, SIZES, recipe=None, main_grad="accumulate")
    assert not late
    assert w.main_grad is other  # type: ignore[attr-defined]
    y.backward(dy)
    assert len(late) == 1
    assert late[0].any()
    assert not other.any()
    assert w.main_grad is seen[0] is late[0]  # type: ignore[attr-defined]


def test_hooks_fire_once_after_the_flag(rng: np.random.Generator) -> None:
    """Autograd's gradient is zeros: hooks of DDP's and FSDP's kind see it once a backward, and the flag is set by then.

    A gradient that is there already stays what it is.
    """
    w, (x, dy) = parameter(), microbatch()
    w.main_grad = torch.zeros(G, N, K)  # type: ignore[attr-defined]
    w.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    seen: list[Tensor] = []

    def hook(p: Tensor) -> None:
        assert p.grad_added_to_main_grad is True  # type: ignore[attr-defined]
        assert p.grad is not None
        seen.append(p.grad)
        p.grad = None

    handle = w.register_post_accumulate_grad_hook(hook)
    for count in (1, 2):
        backward(w, x, dy, main_grad="accumulate")
        assert len(seen) == count
        assert seen[-1].shape == w.shape
        assert not seen[-1].any()
    handle.remove()
    w.grad = torch.ones_like(w)
    backward(w, x, dy, main_grad="accumulate")
    assert torch.equal(w.grad, torch.ones_like(w))


@pytest.mark.parametrize("parted", [False, True], ids=["single", "per group"])
@pytest.mark.parametrize("delayed", [False, True], ids=["at once", "delayed"])
def test_the_gradient_for_autograd_takes_no_memory(parted: bool, delayed: bool, rng: np.random.Generator) -> None:
    """.grad after .backward() has the bytes of one element, microbatch after microbatch; torch.autograd.grad returns
    the same."""
    groups, k, n = 2, 256, 128
    layer = GroupedLinear(
        groups, k, n, dtype=torch.bfloat16, main_grad="accumulate", per_group_parameters=parted, delay_wgrad=delayed,
        backend="torch-reference",
    )  # fmt: skip
    leaves = list(layer.parameters())
    for leaf in leaves:
        leaf.main_grad = torch.zeros(leaf.shape)  # type: ignore[attr-defined]
    x, dy = torch.randn(4, k).bfloat16(), torch.randn(4, n).bfloat16()
    for _ in range(3):
        y = layer(x, [1, 3])
        y.backward(dy)
        if delayed:
            layer.backward_dw()
        for leaf in leaves:
            assert leaf.grad is not None
            assert (leaf.grad.shape, leaf.grad.dtype) == (leaf.shape, leaf.dtype)
            assert leaf.grad.untyped_storage().nbytes() == leaf.element_size()
            assert not leaf.grad.any()
            assert leaf.main_grad.any()  # type: ignore[attr-defined]
    if not delayed:
        for dummy in torch.autograd.grad(layer(x, [1, 3]), leaves, dy):
            assert dummy.untyped_storage().nbytes() == dummy.element_size()


def test_without_a_weight_gradient_nothing_is_touched(rng: np.random.Generator) -> None:
    """A frozen weight, no_grad, and a backward that asks for dx alone: no buffer is needed or written."""
    w, (x, dy) = parameter(), microbatch()
    x.requires_grad_()
    with torch.no_grad():
        grouped_linear(x, w, SIZES, recipe=None, main_grad="accumulate")
    w.requires_grad_(False)
    grouped_linear(x, w, SIZES, recipe=None, main_grad="accumulate").backward(dy)
    w.requires_grad_()
    w.main_grad = torch.zeros(G, N, K)  # type: ignore[attr-defined]
    y = grouped_linear(x, w, SIZES, recipe=None, main_grad="accumulate")
    torch.autograd.grad(y, x, dy, retain_graph=True)
    y.backward(dy, inputs=[x])
    assert not w.main_grad.any()  # type: ignore[attr-defined]
    assert not hasattr(w, "grad_added_to_main_grad")


@pytest.mark.parametrize("reentrant", [False, True])
def test_recompute_accumulates_once(reentrant: bool, rng: np.random.Generator) -> None:
    """Activation checkpointing runs forward twice and adds the gradient once, with the same bits."""
    layer = GroupedLinear(G, K, N, recipe=PRESETS["mxfp8"], dtype=torch.bfloat16, main_grad="accumulate")
    x, dy = microbatch()
    made = []
    runs: list[Callable[[Tensor], Any]] = [
        lambda leaf: layer(leaf, SIZES),
        lambda leaf: checkpoint(layer, leaf, SIZES, use_reentrant=reentrant),
    ]
    for forward in runs:
        layer.weight.main_grad = torch.zeros(G, N, K)  # type: ignore[attr-defined]
        forward(x.clone().requires_grad_()).backward(dy)
        made.append(layer.weight.main_grad)  # type: ignore[attr-defined]
    assert made[0].any()
    assert torch.equal(*made)


def test_compiled_calls_stay_out_of_the_graph_or_are_refused(rng: np.random.Generator) -> None:
    """torch.compile gives eager's bits beside its graph, and with fullgraph=True a sentence; no gradient is lost."""
    torch.compiler.reset()
    layer = GroupedLinear(G, K, N, recipe=PRESETS["mxfp8"], dtype=torch.bfloat16, main_grad="accumulate")
    x, dy = microbatch()
    sizes = torch.tensor(SIZES)
    made = []
    for forward in (layer, torch.compile(layer, backend="aot_eager")):
        layer.weight.main_grad = torch.zeros(G, N, K)  # type: ignore[attr-defined]
        forward(x, sizes).backward(dy)
        made.append(layer.weight.main_grad)  # type: ignore[attr-defined]
    assert made[0].any()
    assert torch.equal(*made)
    torch.compiler.reset()
    with pytest.raises(Exception, match="main_grad or delayed_wgrad was given, and a traced backward can neither"):
        torch.compile(layer, backend="aot_eager", fullgraph=True)(x, sizes)
    torch.compiler.reset()
