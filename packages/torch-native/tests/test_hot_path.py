"""What a call costs beside its kernel: no foreign frame, nothing kept, no lock that threads wait for."""

from __future__ import annotations

import gc
import sys
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

import octavo_torch
import octavo_torch_native as native
from octavo_conformance.variants import RAGGED
from octavo_torch_native.quantizer import Quantizer

FORBIDDEN = ("pydantic", "pydantic_core", "pluggy", "inspect", "os", "posixpath", "importlib", "json", "functools")
SIZES = torch.tensor([3, 0, 5])
NAMES = ("current.e4m3", "block.e4m3.pow2", "mxfp8.e4m3", "nvfp4.stochastic.hadamard")

pytestmark = pytest.mark.usefixtures("one_thread")


def arguments(name: str) -> dict[str, Any]:
    return {"seed": 7} if RAGGED[name].stochastic else {}


def calls(name: str) -> dict[str, Callable[[], Any]]:
    """The ways to quantize: the bound function, the front end, this package's functions, a fused one."""
    spec, x, given = RAGGED[name], torch.randn(8, 32), arguments(name)
    run = Quantizer(spec)
    held = run(x, SIZES, **given)
    plan = native.plan(SIZES, 8)
    return {
        "bound": lambda: run(x, SIZES, **given),
        "bound, out": lambda: run(x, SIZES, out=held, **given),
        "bound, planned": lambda: run(x, plan, **given),
        "front end": lambda: octavo_torch.quantize(x, spec, SIZES, **given),
        "native": lambda: native.quantize(x, spec, plan, amax=True, **given),
        "fused": lambda: native.act_quantize(x, spec, SIZES, activated=True, **given),
        "dequantize": lambda: native.dequantize(held),
    }


def frames_of(call: Callable[[], Any]) -> Counter[str]:
    """Modules of the Python frames that `call` enters."""
    seen: Counter[str] = Counter()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            seen[frame.f_globals.get("__name__", "")] += 1

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


@pytest.mark.parametrize("name", NAMES)
def test_thousand_calls_enter_no_foreign_frame(name: str) -> None:
    """sys.setprofile over 1 000 runs, after the first (architecture.md, "The hot path")."""
    for what, call in calls(name).items():
        call()

        def many(call: Callable[[], Any] = call) -> None:
            for _ in range(1000):
                call()

        seen = frames_of(many)
        foreign = {module: count for module, count in seen.items() if module.split(".")[0] in FORBIDDEN}
        assert not foreign, what
        assert seen["octavo_torch_native.launch"] >= 1000, what


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_kept(name: str) -> None:
    """Memory and objects after 500 calls are those after 20 (faults 52, 53)."""
    for what, call in calls(name).items():
        for _ in range(20):
            call()
        gc.collect()
        tracemalloc.start()
        try:
            call()
            before, objects = tracemalloc.get_traced_memory()[0], len(gc.get_objects())
            for _ in range(500):
                call()
            gc.collect()
            grown = tracemalloc.get_traced_memory()[0] - before
            # an object kept by each call would be 16 bytes at the least
            assert grown < 500 * 8, f"{what}: 500 calls keep {grown} bytes"
            assert len(gc.get_objects()) - objects < 100, what
        finally:
            tracemalloc.stop()


def test_shapes_that_never_repeat_are_not_all_kept() -> None:
    """A router gives another number of rows each step; what is kept for a shape is bounded (fault 52)."""
    run = Quantizer(RAGGED["mxfp8.e4m3"])
    kernel = run._by_operand[None][1]
    for rows in range(1, 2500):
        kernel.frame(torch.empty(rows, 32, device="meta"), 1)
    assert len(kernel._frames) <= 1024


def test_eight_threads(rng: np.random.Generator) -> None:
    """Concurrent calls on other shapes, specs and plans give each thread its own bits."""
    problems = []
    for number in range(8):
        spec = RAGGED[NAMES[number % len(NAMES)]]
        x = torch.randn(40 + 60 * number, 48 + 16 * number)
        sizes = torch.tensor([number, 0, 30])
        given = arguments(NAMES[number % len(NAMES)])
        expected = native.quantize(x, spec, sizes, **given).codes
        values = [native.dequantize(expected, direction) for direction in ("rowwise", "columnwise")]
        problems.append((x, spec, sizes, given, values))
    wrong: list[str] = []
    barrier = threading.Barrier(8)

    def work(number: int) -> None:
        x, spec, sizes, given, values = problems[number]
        barrier.wait()
        for _ in range(50):
            q = native.quantize(x, spec, sizes, **given).codes
            for direction, value in zip(("rowwise", "columnwise"), values, strict=True):
                if not torch.equal(native.dequantize(q, direction), value):  # type: ignore[arg-type]
                    wrong.append(f"thread {number}, {direction}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong
