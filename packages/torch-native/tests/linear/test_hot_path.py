"""What a call costs beside its kernel: no foreign frame, nothing kept, no lock that threads wait for."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import native_calls as native
import numpy as np
import pytest
import torch
from memory_kept import keeps_nothing
from torch.utils._python_dispatch import TorchDispatchMode

import octavo_torch
from octavo import NVFP4, BlockScaling, HighPrecision
from octavo_conformance.cards.variants import RAGGED
from octavo_torch_native.gemm.gemm import Dgrad, Fprop, Wgrad
from octavo_torch_native.quantizers.quantizer import Quantizer

FORBIDDEN = ("pydantic", "pydantic_core", "pluggy", "inspect", "os", "posixpath", "importlib", "json", "functools")
SIZES = torch.tensor([3, 0, 5])
NAMES = ("current.e4m3", "block.e4m3.pow2", "mxfp8.e4m3", "nvfp4.stochastic.hadamard")

pytestmark = pytest.mark.usefixtures("one_thread")


def arguments(name: str) -> dict[str, Any]:
    return {"seed": 7} if RAGGED[name].stochastic else {}


def calls(name: str) -> dict[str, Callable[[], Any]]:
    """The ways to quantize: the bound function, the front end, a fused function; and the way back."""
    spec, x, given = RAGGED[name], torch.randn(8, 32), arguments(name)
    run = Quantizer(spec)
    held = run(x, SIZES, **given)
    plan = native.plan(SIZES, 8)
    return {
        "bound": lambda: run(x, SIZES, **given),
        "bound, out": lambda: run.into(x, SIZES, out=held, **given),
        "bound, planned": lambda: run(x, plan, **given),
        "front end": lambda: octavo_torch.quantize(x, spec, SIZES, **given),
        "front end, out": lambda: octavo_torch.quantize(x, spec, SIZES, out=held, **given),
        "bound, amax": lambda: run.with_amax(x, plan, **given),
        "fused": lambda: octavo_torch.act_quantize(x, spec, SIZES, activation="swiglu", **given),
        "dequantize": lambda: octavo_torch.dequantize(held),
    }


GEMM_RECIPES = {"bf16": HighPrecision(), "block": BlockScaling(), "nvfp4": NVFP4(stochastic_gradients=False)}


def gemm_calls(name: str) -> dict[str, Callable[[], Any]]:
    """The bound GEMMs on native operands: with sizes, with a plan, into a buffer; a layer of the front end."""
    recipe, plan = GEMM_RECIPES[name], native.plan(SIZES, 8)
    values = {"x": torch.randn(8, 32), "w": torch.randn(3, 16, 32), "dy": torch.randn(8, 16)}
    operands: dict[str, Any] = {}
    for operand, value in values.items():
        spec = recipe.quantizer(operand)  # type: ignore[arg-type]
        sizes = None if operand == "w" else plan
        operands[operand] = (
            value if spec is None else native.quantize(value, spec, sizes, layouts=("rows", "panels")).codes
        )
    x, w, dy = operands.values()
    fprop, dgrad, wgrad = Fprop("float32"), Dgrad("float32"), Wgrad("bfloat16")
    main_grad = torch.zeros(3, 16, 32)
    bias, scales = torch.randn(3, 16), torch.randn(8)
    return {
        "fprop": lambda: fprop(x, w, SIZES),
        "fprop, planned": lambda: fprop(x, w, plan),
        "fprop, bias": lambda: fprop(x, w, plan, bias=bias, bias_scales=scales),
        "dgrad": lambda: dgrad(dy, w, plan),
        "wgrad": lambda: wgrad(x, dy, plan),
        "wgrad, accumulate": lambda: wgrad(x, dy, plan, out=main_grad, accumulate=True),
        "layer": lambda: octavo_torch.grouped_linear(values["x"], values["w"], SIZES, recipe=recipe),
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


def assert_no_foreign_frame(what: str, call: Callable[[], Any], times: int) -> None:
    """Of `times` runs, each of which launches. The first run of a process loads the backend, and layers that were made
    while it did are made once more."""
    for _ in range(2):
        call()

    def many() -> None:
        for _ in range(times):
            call()

    seen = frames_of(many)
    foreign = {module: count for module, count in seen.items() if module.split(".")[0] in FORBIDDEN}
    assert not foreign, what
    assert seen["octavo_torch_native.arrays.launch"] >= times, what


@pytest.mark.parametrize("name", NAMES)
def test_thousand_calls_enter_no_foreign_frame(name: str) -> None:
    """sys.setprofile over 1 000 runs, fewer of other recipes, after the first (architecture.md, "The hot path")."""
    for what, call in calls(name).items():
        assert_no_foreign_frame(what, call, 1000 if name == NAMES[0] else 100)


def assert_nothing_kept(calls: dict[str, Callable[[], Any]]) -> None:
    """Of memory, by any of these calls."""

    def call_each() -> None:
        for call in calls.values():
            call()

    assert keeps_nothing(call_each), [what for what, call in calls.items() if not keeps_nothing(call)]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_kept(name: str) -> None:
    """Memory and objects after calls are those before them (faults 52, 53)."""
    assert_nothing_kept(calls(name))


@pytest.mark.parametrize("name", GEMM_RECIPES)
def test_gemms_enter_no_foreign_frame(name: str) -> None:
    """The same for the GEMMs and a layer around them."""
    for what, call in gemm_calls(name).items():
        assert_no_foreign_frame(what, call, 100)


class Operations(TorchDispatchMode):
    """The operators that calls run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(function.overloadpacket))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", GEMM_RECIPES)
def test_a_planned_gemm_allocates_its_result_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One torch.empty, two where the kernel wants scratch: no copy, no fill, nothing that would wait."""
    monkeypatch.undo()  # of poisoned memory, which fills
    for what, call in gemm_calls(name).items():
        if what in ("fprop", "layer"):
            continue
        call()
        with Operations() as operations:
            call()
        made = Counter(operations.seen)
        assert set(made) <= {"aten.empty"}, f"{what}: {dict(made)}"
        assert made["aten.empty"] <= (1 if "accumulate" in what else 2), what


@pytest.mark.parametrize("name", GEMM_RECIPES)
def test_gemms_keep_nothing(name: str) -> None:
    """The same for the GEMMs and a layer around them (faults 52, 53)."""
    assert_nothing_kept(gemm_calls(name))


def test_shapes_that_never_repeat_are_not_all_kept() -> None:
    """A router gives another number of rows each step; what is kept for a shape is bounded (fault 52)."""
    run = Quantizer(RAGGED["mxfp8.e4m3"])
    launch = run._by_operand[None]
    for rows in range(1, 2500):
        launch.shapes(torch.empty(rows, 32, device="meta"), 1)
    assert len(launch._shapes) <= 1024


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
