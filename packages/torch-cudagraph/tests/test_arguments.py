"""Arguments of captured functions: what a graph would keep by mistake, and what differs at a replay."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

import octavo_torch_cudagraph as graphs
from octavo_torch_cudagraph.arguments import Arguments


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if CPU tensors were on a GPU."""
    monkeypatch.setattr("octavo_torch_cudagraph.arguments.on_host", lambda tensor: False)


@pytest.mark.parametrize(
    ("examples", "sentence"),
    [
        (
            (torch.zeros(2, 3),),
            "argument 0 is float32 [2, 3] on cpu, whose values a CUDA graph would keep; move",
        ),
        ((torch.tensor([3, 5]),), "argument 0 is int64 [2] on cpu"),
        (([3, 5],), "argument 0[0] is the integer 3, which a CUDA graph would keep; give sizes as a tensor on the GPU"),
        (({"sizes": (3,)},), "argument 0['sizes'][0] is the integer 3"),
        ((np.array([3, 5]),), "argument 0 is a ndarray, whose values a CUDA graph would keep"),
        ((None, 2, "name"), "there is no tensor among the arguments"),
        ((), "there is no tensor among the arguments"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_graph_would_keep_is_refused(examples: tuple[Any, ...], sentence: str) -> None:
    """Host sizes above all (fault 36); before anything touches a device."""
    with pytest.raises(ValueError, match=re.escape(sentence)):
        graphs.capture(lambda *_: None, *examples)


@pytest.mark.parametrize("warmup", [1, 0, True, 2.0])
def test_a_warm_up_that_shows_nothing_is_refused(warmup: Any) -> None:
    """The first run may wait; without a second nobody knows whether the function does."""
    with pytest.raises(ValueError, match=f"warmup is {warmup!r}; give 2 or more"):
        graphs.capture(lambda x: x, torch.zeros(1), warmup=warmup)


def test_the_graph_has_tensors_of_its_own(everywhere: None) -> None:
    """Values, strides and requires_grad of the examples; constants as they are; nested containers."""
    x = torch.randn(4, 6).T.requires_grad_()
    arguments = Arguments([{"x": x, "sizes": torch.tensor([1, 2])}, None, "name", 2])
    first, *rest = arguments.values
    assert rest == [None, "name", 2]
    assert first["x"] is not x
    assert torch.equal(first["x"], x)
    assert (first["x"].stride(), first["x"].requires_grad) == (x.stride(), True)
    assert first["x"].is_leaf
    new = torch.randn(6, 4)
    arguments.copy_in([{"x": new, "sizes": torch.tensor([5, 6])}, None, "name", 2])
    assert torch.equal(arguments.values[0]["x"], new)
    assert arguments.values[0]["sizes"].tolist() == [5, 6]
    arguments.copy_in(arguments.values)  # its own tensors need no copy


SAME = ({"x": torch.zeros(4, 6)}, torch.tensor([1, 2]), 3, None)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (({"x": torch.zeros(1, 6)}, SAME[1], 3, None), "argument 0['x'] is float32 [1, 6] on cpu and the graph was"),
        (({"x": torch.zeros(4, 6).half()}, SAME[1], 3, None), "argument 0['x'] is float16 [4, 6] on cpu"),
        (({"x": torch.zeros(4, 6, device="meta")}, SAME[1], 3, None), "argument 0['x'] is float32 [4, 6] on meta"),
        ((SAME[0], [1, 2], 3, None), "the arguments are ({'x': *}, [*, *], *, *) and those of the capture were"),
        ((SAME[0], 1, 3, None), "argument 1 is of type int; give int64 [2]"),
        ((SAME[0], SAME[1], 4, None), "argument 2 is 4 and the graph was captured with 3; capture another graph"),
        ((SAME[0], SAME[1], 3.0, None), "argument 2 is 3.0 and the graph was captured with 3"),
        ((SAME[0], SAME[1], 3, 0), "argument 3 is 0 and the graph was captured with None"),
        ((SAME[0], SAME[1], 3), "give as many, in the same containers"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_differs_at_a_replay_is_refused(given: tuple[Any, ...], sentence: str, everywhere: None) -> None:
    """copy_ would broadcast one row into all; nothing is written before everything fits."""
    arguments = Arguments(SAME)
    before = arguments.tensors[0].clone()
    with pytest.raises(ValueError, match=re.escape(sentence)):
        arguments.copy_in(given)
    assert torch.equal(arguments.tensors[0], before)


def test_two_devices_are_refused(everywhere: None) -> None:
    """A graph is one device's."""
    with pytest.raises(ValueError, match=r"argument 1 is on meta and argument 0 on cpu; move one of them"):
        Arguments([torch.zeros(1), torch.zeros(1, device="meta")])
    with pytest.raises(ValueError, match=r"argument 2 is on meta and argument 1 on cpu; move one of them"):
        Arguments([None, torch.zeros(1), torch.zeros(1, device="meta")])
