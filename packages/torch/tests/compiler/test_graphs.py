"""What `octavo_torch.compiler.graphs` says of functions that cannot be captured; the captures themselves need a GPU."""

from __future__ import annotations

import warnings

import pytest
import torch

from octavo import NoBackendError
from octavo_torch.bridge import BRIDGE
from octavo_torch.compiler import graphs, status


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The sync debug modes that were set, in a process without a GPU."""
    seen: list[object] = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", seen.append)
    return seen


def test_waits_are_explained(modes: list[object]) -> None:
    """torch's word for it becomes a sentence with what to do; the mode of before comes back."""
    with (
        pytest.raises(graphs.GraphUnsafeError, match=r"waits for the device \(called a synchronizing CUDA operation\)"),
        graphs.explained_waits(),
    ):
        raise RuntimeError("called a synchronizing CUDA operation\nand more")
    assert modes == ["error", 1]
    sentence = r"cannot be captured into a CUDA graph \(CUDA error: x\)"
    with pytest.raises(graphs.GraphUnsafeError, match=sentence), graphs.explained_waits():
        raise RuntimeError("CUDA error: x")


def test_torchs_own_warning_is_no_error(modes: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    """torch sets the mode, then warns that it is a prototype: where warnings are errors, the mode had stayed."""

    def warn(mode: object) -> None:
        modes.append(mode)
        if mode == "error":
            warnings.warn("Synchronization debug mode is a prototype feature and so on", stacklevel=2)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", warn)
    with graphs.no_waiting():
        assert modes == ["error"]
    assert modes == ["error", 1]


def _broken_off(error: Exception) -> None:
    try:
        raise error
    finally:
        raise RuntimeError("capture_end: operation failed due to a previous error during capture")


def test_errors_that_speak_for_themselves_stay(modes: list[object]) -> None:
    """Even where ending the capture raises once more over them."""
    for error in (NoBackendError("none", ()), ValueError("a sentence"), NotImplementedError("no derivative")):
        with pytest.raises(type(error)) as caught, graphs.explained_waits():
            raise error
        assert caught.value is error
        with pytest.raises(type(error)) as caught, graphs.explained_waits():
            _broken_off(error)
        assert caught.value is error


def test_host_memory_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that a replay would copy again from memory that is gone (fault 36)."""

    class OnGpu:
        is_cuda, device = True, "cuda:0"

    graphs.check_not_captured("group_sizes", OnGpu())  # type: ignore[arg-type]
    monkeypatch.setattr(graphs, "is_capturing", lambda: True)
    with pytest.raises(graphs.GraphUnsafeError, match="group_sizes is on the host and this call is being captured"):
        graphs.check_not_captured("group_sizes", OnGpu())  # type: ignore[arg-type]
    graphs.check_not_captured("group_sizes", torch.zeros(1))
    assert graphs.wants_graph(OnGpu())  # type: ignore[arg-type]
    assert not graphs.wants_graph(torch.zeros(1))


def test_the_flag_of_bad_sizes_is_not_born_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each replay would clear it."""
    monkeypatch.setattr(status, "is_capturing", lambda: True)
    with pytest.raises(graphs.GraphUnsafeError, match="run the function once before the capture"):
        status.status_word(torch.device("cuda", 77))


def test_the_bridge_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays are copied into the graph's own, which the function was given."""

    class Graph:
        replays = 0

        def replay(self) -> None:
            self.replays += 1

    graph, seen = Graph(), []
    monkeypatch.setattr(graphs, "record", lambda function, device: (graph, seen.append(device) or function()))
    x = torch.ones(3)
    replay = BRIDGE.capture(lambda own: own, x)
    own = replay(torch.full((3,), 2.0))
    assert own is not x
    assert own.tolist() == [2.0, 2.0, 2.0]
    assert (graph.replays, seen) == (1, [x.device])
