"""Which buffers main_grad writes, in place through their strides, and which it refuses before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from main_grad_calls import SIZES, G, K, N, backward, microbatch, parameter
from torch import Tensor, nn

from octavo_torch import GroupedLinear, grouped_linear
from octavo_torch.wgrad.main_grad import check_alignment


def apart(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Memory with a pattern, and a [G, N, K] view of it whose rows and groups stand apart."""
    memory = torch.full((G, N + 3, K + 16), 5.0, dtype=dtype)
    return memory, memory[:, 1 : N + 1, 8 : K + 8]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", ["accumulate", "overwrite"])
def test_strided_buffers_are_written_in_place(mode: str, dtype: torch.dtype, rng: np.random.Generator) -> None:
    """Bits of the contiguous buffer's, and nothing beside them is touched (faults of strides)."""
    x, dy = microbatch()
    w = parameter()
    memory, view = apart(dtype)
    w.main_grad = torch.full((G, N, K), 5.0, dtype=dtype)  # type: ignore[attr-defined]
    backward(w, x, dy, main_grad=mode)
    expected = w.main_grad  # type: ignore[attr-defined]
    w.main_grad = view  # type: ignore[attr-defined]
    backward(w, x, dy, main_grad=mode)
    assert torch.equal(view, expected)
    view.fill_(5.0)
    assert bool((memory == 5.0).all())


@pytest.mark.parametrize("mode", ["accumulate", "overwrite"])
def test_flat_buffers_are_written_through_views(mode: str, rng: np.random.Generator) -> None:
    """[G * N * K] and [G * N, K], its rows apart or not: the bits of the buffer in the weight's shape, in place; of one
    tensor per group [N * K] likewise."""
    x, dy = microbatch()
    w = parameter()
    start = torch.randn(G, N, K)
    w.main_grad = start.clone()  # type: ignore[attr-defined]
    backward(w, x, dy, main_grad=mode)
    expected = w.main_grad  # type: ignore[attr-defined]
    wide = torch.full((G * N, K + 8), 5.0)
    wide[:, :K] = start.view(G * N, K)
    for buffer in (start.flatten().clone(), start.view(G * N, K).clone(), wide[:, :K]):
        w.main_grad = buffer  # type: ignore[attr-defined]
        backward(w, x, dy, main_grad=mode)
        assert w.main_grad is buffer  # type: ignore[attr-defined]
        assert torch.equal(buffer.reshape(G, N, K), expected)
    assert bool((wide[:, K:] == 5.0).all())
    parts = [nn.Parameter(part) for part in w.detach().unbind(0)]
    for part, values in zip(parts, start, strict=True):
        part.main_grad = values.flatten().clone()  # type: ignore[attr-defined]
    backward(parts, x, dy, main_grad=mode)
    assert torch.equal(torch.stack([part.main_grad for part in parts]).view(G, N, K), expected)  # type: ignore[attr-defined]


def overlapping() -> Tensor:
    return torch.zeros(K).expand(G, N, K)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "absent": (lambda: None, r"weight.main_grad is None or absent; set it to a float32 tensor \[5, 32, 48\] on cpu"),
    "type": (lambda: 3.0, "weight.main_grad is a float; give a plain strided tensor"),
    "shape": (lambda: torch.zeros(G, K, N), r"is float32 \[5, 48, 32\] on cpu; give .* \[5, 32, 48\] on cpu"),
    "another flat": (lambda: torch.zeros(G * K * N - 1), r"is float32 \[7679\] on cpu; .* as \[7680\] or \[160, 48\]"),
    "every other": (lambda: torch.zeros(2 * G * K * N)[::2], r"has shape \[7680\] and strides \[2\]"),
    "dtype": (lambda: torch.zeros(G, N, K, dtype=torch.float64), "is float64"),
    "device": (lambda: torch.zeros(G, N, K, device="meta"), r"on meta; give .* on cpu"),
    "gradient": (lambda: torch.zeros(G, N, K, requires_grad=True), "requires a gradient"),
    "sparse": (lambda: torch.zeros(G, N, K).to_sparse(), "torch.sparse_coo tensor; give a plain strided"),
    "expanded": (overlapping, r"strides \[0, 0, 1\], which cannot be written in place; give a buffer whose"),
    "columns apart": (lambda: torch.zeros(G, K, N).transpose(1, 2), r"strides \[1536, 1, 32\]"),
    "groups interleaved": (lambda: torch.zeros(N, G, K).transpose(0, 1), r"strides \[48, 240, 1\]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_anything_runs(name: str) -> None:
    """In forward for main_grad, in backward for what get_main_grad returned; one line, and no gradient is left."""
    make, pattern = REFUSED[name]
    w, (x, dy) = parameter(), microbatch()
    w.main_grad = make()  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=pattern) as caught:
        grouped_linear(x, w, SIZES, recipe=None, main_grad="accumulate")
    assert "\n" not in str(caught.value)
    w.get_main_grad = make  # type: ignore[attr-defined]
    y = grouped_linear(x, w, SIZES, recipe=None, main_grad="accumulate")
    with pytest.raises(ValueError, match=pattern.replace(r"weight.main_grad", r"weight.get_main_grad\(\)")):
        y.backward(dy)
    assert w.grad is None
    assert not hasattr(w, "grad_added_to_main_grad")


def test_buffers_on_a_gpu_are_whole_pieces() -> None:
    """16-byte pieces, which the check of CUDA buffers asks for; rows that no such kernel serves are not judged."""
    memory = torch.zeros(G, N, K + 16)
    check_alignment("b", memory[..., 4 : K + 4])
    with pytest.raises(ValueError, match=r"b starts at 0x.* multiples of 16 bytes"):
        check_alignment("b", memory[..., 1 : K + 1])
    with pytest.raises(ValueError, match=r"are \[6272, 196\] bytes apart"):
        check_alignment("b", torch.zeros(G, N, K + 1)[..., :K])
    check_alignment("b", torch.zeros(G, N, K - 1))


def test_modes_and_weights_that_are_refused() -> None:
    """Other modes, and weights that are results, whose source would get zeros."""
    w, (x, _) = parameter(), microbatch()
    with pytest.raises(ValueError, match="main_grad is 'add'; give 'accumulate', 'overwrite' or None"):
        grouped_linear(x, w, SIZES, recipe=None, main_grad="add")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"main_grad is a Tensor; set it as weight.main_grad"):
        grouped_linear(x, w, SIZES, recipe=None, main_grad=torch.zeros(G, N, K))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="main_grad is a ndarray"):
        grouped_linear(x, w, SIZES, recipe=None, main_grad=np.zeros(2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="main_grad is True"):
        GroupedLinear(G, K, N, main_grad=True)  # type: ignore[arg-type]
    derived = w * 2
    derived.main_grad = torch.zeros(G, N, K)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="weight is the result of an operation"):
        grouped_linear(x, derived, SIZES, recipe=None, main_grad="accumulate")
