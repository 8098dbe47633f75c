"""CUDA graphs: when a plan has to be graph-safe, and how a function is warmed up and captured."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import torch
from torch import Tensor
from torch.cuda import _POOL_HANDLE

from octavo import OctavoError

WARMUP = 3
"""Runs before a capture: one that may wait while libraries load, and others in which a wait is an error."""

R = TypeVar("R")

_PROTOTYPE = "Synchronization debug mode is a prototype feature"
_graph_safe: ContextVar[bool] = ContextVar("octavo_torch.graph_safe", default=False)
_initialized: Callable[[], bool] = torch.cuda.is_initialized
_capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing


class GraphUnsafeError(OctavoError, RuntimeError):
    """A function cannot be captured into a CUDA graph; the message says what it does and what to do."""


def is_capturing() -> bool:
    """True while the current stream of the current device is captured."""
    # without a driver the second call raises
    return _initialized() and _capturing()


def wants_graph(x: Tensor) -> bool:
    """True where a call on `x` needs graph-safe plans: inside of `graph_safe()`, and while a stream is captured."""
    return _graph_safe.get() or (x.is_cuda and is_capturing())


@contextmanager
def graph_safe() -> Iterator[None]:
    """Every plan that the block resolves or uses may be captured; NoBackendError, with the reasons, where none may.

    While a stream is captured this is so without the block. Inside it a warm-up run has the plans of the capture.
    """
    token = _graph_safe.set(True)
    try:
        yield
    finally:
        _graph_safe.reset(token)


def check_not_captured(what: str, like: Tensor) -> None:
    """GraphUnsafeError while a graph is captured on `like`'s device: `what` is in host memory and would be copied."""
    if like.is_cuda and is_capturing():
        raise GraphUnsafeError(
            f"{what} is on the host and this call is being captured into a CUDA graph, where the copy to {like.device} "
            f"would be made again at each replay from memory that is gone; give a tensor on {like.device}"
        )


@contextmanager
def no_waiting() -> Iterator[None]:
    """A wait for a CUDA device inside the block raises RuntimeError."""
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=_PROTOTYPE)  # sets the mode first, and may be an error
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def record(
    function: Callable[[], R], device: torch.device, *, warmup: int = WARMUP, pool: _POOL_HANDLE | None = None
) -> tuple[torch.cuda.CUDAGraph, R]:
    """`function` captured on a stream of its own after `warmup` runs on it; the graph and what the function returned.

    warmup   runs before the capture, at least 2: the first may wait, the others may not
    pool     another graph's `pool()`, where the two never run at once; None: a pool of its own

    Tensors that the function makes are the graph's: each replay writes them again. What it reads and keeps (constants
    of its own, a quantizer's scales) is read at each replay, so the caller keeps `function` as long as the graph.
    Raises GraphUnsafeError where the function waits for the device, and whatever it raises itself.
    """
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.device(device), graph_safe():
        with torch.cuda.stream(stream):
            function()
            with explained_waits():
                for _ in range(warmup - 1):
                    function()
        torch.cuda.current_stream(device).wait_stream(stream)
        return capture_on(stream, function, pool)


def capture_on(
    stream: torch.cuda.Stream, function: Callable[[], R], pool: _POOL_HANDLE | None
) -> tuple[torch.cuda.CUDAGraph, R]:
    """`function`, which has been warmed up there, captured on `stream`; the graph and what the function returned."""
    # garbage collection during the capture could free an earlier graph, which would break the capture off
    gc.collect()
    graph = torch.cuda.CUDAGraph()
    with explained_waits(), torch.cuda.graph(graph, pool=pool, stream=stream):
        result = function()
    return graph, result


@contextmanager
def explained_waits() -> Iterator[None]:
    """`no_waiting`, where what torch and CUDA raise becomes a GraphUnsafeError; Octavo's errors stay as they are."""
    try:
        with no_waiting():
            yield
    except RuntimeError as error:
        first = _first_of(error)
        if first is error and _speaks_for_itself(error):
            raise
        raise (first if _speaks_for_itself(first) else GraphUnsafeError(_sentence(first))) from error


def _first_of(error: BaseException) -> BaseException:
    """The error that began the chain: a capture that is broken off raises once more while it ends."""
    while error.__context__ is not None and isinstance(error, RuntimeError):
        error = error.__context__
    return error


def _speaks_for_itself(error: BaseException) -> bool:
    return isinstance(error, OctavoError | NotImplementedError) or not isinstance(error, RuntimeError)


def _sentence(error: BaseException) -> str:
    line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    if "synchroniz" in line:
        return (
            f"the function waits for the device ({line}), which a CUDA graph cannot; the traceback above shows where. "
            "Keep sizes, seeds and conditions on the device, and read values after the replay"
        )
    return (
        f"the function cannot be captured into a CUDA graph ({line}); the traceback above shows where. Let nothing in "
        "it wait for the device or use a stream that does not follow this one, and drop what an earlier forward left "
        "for its backward"
    )
