"""A pass that is written down, and run again on other arrays; and what cannot be."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo_torch.recording import recorded_pass
from octavo_torch.recording import tape as tape_module
from octavo_torch.recording.recorded_pass import RecordedPass
from octavo_torch.recording.tape import Tape

SIZE = 64
Kernel = Callable[..., None]


class Kernels:
    """A recorder of launches that are Python functions of addresses: what a backend writes down of its own."""

    active: Kernels | None = None

    def __init__(self, like: Tensor) -> None:
        self.refusal: str | None = None
        self._named: list[tuple[int, int, int]] = []  # number, start, end
        self._launches: list[tuple[Kernel, list[tuple[int, int]]]] = []
        self._count = 0

    def __enter__(self) -> Kernels:
        Kernels.active = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        Kernels.active = None

    def name(self, start: int, size: int, replaces: bool, /) -> None:
        shared = [one for one in self._named if one[1] < start + size and start < one[2]]
        if shared and not replaces:
            raise ValueError("shares bytes")
        self._named = [one for one in self._named if one not in shared]
        self._named.append((self._count, start, start + size))
        self._count += 1

    def add(self, kernel: Kernel, addresses: Sequence[int]) -> None:
        places = []
        for address in addresses:
            inside = [(number, address - start) for number, start, end in self._named if start <= address < end]
            if not inside:
                self.refusal = "an array has no number"
                return
            places += inside
        self._launches.append((kernel, places))

    def arrays(self) -> list[list[int]]:
        return [[number for number, _ in places] for _, places in self._launches]

    def run(self, addresses: list[int], like: Tensor, first: int, end: int, /) -> None:
        for kernel, places in self._launches[first:end]:
            kernel(*[addresses[number] + offset for number, offset in places])


def launch(kernel: Kernel, *tensors: Tensor) -> None:
    """Makes a launch, which the recorder that is listening writes down."""
    addresses = [tensor.data_ptr() for tensor in tensors]
    if Kernels.active is not None:
        Kernels.active.add(kernel, addresses)
    kernel(*addresses)


def _values(address: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_float * SIZE).from_address(address))


def add(a: int, b: int, out: int) -> None:
    _values(out)[:] = _values(a) + _values(b)


def double(a: int, out: int) -> None:
    _values(out)[:] = 2 * _values(a)


def empty() -> Tensor:
    return torch.empty(SIZE)


def passed(x: Tensor, y: Tensor, stop: Callable[[str], None] = lambda name: None) -> tuple[Tensor, Tensor, Tensor]:
    """2 (x + y), transposed, and 4 (x + y) + y, by way of arrays of its own, and y itself."""
    total = empty()
    launch(add, x, y, total)
    twice = empty().view(8, 8)
    launch(double, total, twice)
    stop("total")
    del total
    again = torch.empty_like(twice)
    launch(double, twice, again)
    result = twice.new_empty(SIZE)
    launch(add, again, y, result)
    return twice.mT, result, y


def write(x: Tensor, y: Tensor) -> RecordedPass:
    with Tape(Kernels, x, [x, None, y]) as tape:
        results = passed(x, y, tape.stop)
    return RecordedPass(tape, [x, None, y], [*results, None])


def test_it_runs_on_other_arrays(rng: np.random.Generator) -> None:
    """Results are fresh arrays with the shapes and values of the pass, given ones are returned as they are, None stays
    None, and each stop comes when the launches before it were made."""
    written = write(torch.randn(SIZE), torch.randn(SIZE))
    for _ in range(3):
        x, y = torch.randn(SIZE), torch.randn(SIZE)
        expected = passed(x, y)
        stops: list[str] = []
        twice, result, same, nothing = written.run([x, None, y], x, stops.append)
        assert twice is not None
        assert result is not None
        assert (twice.shape, twice.stride()) == ((8, 8), (1, 8))
        assert torch.equal(twice, expected[0])
        assert torch.equal(result, expected[1])
        assert same is y
        assert nothing is None
        assert stops == ["total"]


def test_large_arrays_are_there_for_the_launches_that_use_them(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is allocated before its first launch and freed after its last, so that as much is held at once as by the
    pass itself; stops come where they came, also before the first launch and after the last one."""
    monkeypatch.setattr(recorded_pass, "SMALL", 1)
    x = torch.randn(SIZE)
    with Tape(Kernels, x, [x]) as tape:
        tape.stop("before")
        first, second = empty(), empty()
        launch(double, x, first)
        launch(double, first, second)
        del first
        tape.stop("between")
        third = empty()
        launch(add, second, x, third)
        del second
        result = empty()
        launch(double, third, result)
        tape.stop("after")
    written = RecordedPass(tape, [x], [result])
    held: list[int] = []
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    real = torch.empty

    def counted(*size: int, **options: torch.dtype) -> Tensor:
        made = real(*size, **options)  # type: ignore[call-overload]
        alive.add(made)
        # the block of small arrays, of which there are none, is there all the time
        held.append(len(alive) - 1)
        return made

    monkeypatch.setattr(torch, "empty", counted)
    stops: list[str] = []
    (found,) = written.run([x], x, stops.append)
    assert found is not None
    assert torch.equal(found, 2 * (4 * x + x))
    assert stops == ["before", "between", "after"]
    assert max(held) == 2


def test_memory_that_was_freed_is_another_array(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass frees an array, and the next one lies at its address: each launch reads the one that it was given."""
    alias = torch.ops.aten.alias.default  # stands for an allocator that gives the same memory again
    monkeypatch.setattr(tape_module, "_ALLOCATIONS", {alias, torch.ops.aten.empty.memory_format})
    memory, x = torch.empty(SIZE), torch.randn(SIZE)
    with Tape(Kernels, x, [x]) as tape:
        first = alias(memory)
        launch(double, x, first)
        other, result = empty(), empty()
        launch(double, first, other)
        again = alias(memory)
        launch(add, other, x, again)
        launch(add, again, x, result)
    written = RecordedPass(tape, [x], [result])
    y = torch.randn(SIZE)
    (found,) = written.run([y], y)
    assert found is not None
    assert torch.equal(found, 4 * y + y + y)


@pytest.mark.parametrize(
    ("reason", "says"),
    [
        ("computes", "it calls aten.add"),
        ("not given", "an array has no number"),
        ("given twice", "shares bytes"),
        ("a view", "not an array of its own"),
        ("returned twice", "not an array of its own"),
        ("expanded", "not an array of its own"),
        ("never written", "no launch writes a result"),
        ("elsewhere", "an array on meta"),
    ],
)
def test_what_cannot_be_run_again_says_why(reason: str, says: str, rng: np.random.Generator) -> None:
    """An operation of torch's own would be missing, and an array that nobody knows would be read where it was."""
    x, y, hidden = (torch.randn(SIZE) for _ in range(3))
    given = [x, x] if reason == "given twice" else [x, y]
    with Tape(Kernels, x, given) as tape:
        out = empty()
        launch(double, hidden if reason == "not given" else x, out)
        results = [out]
        if reason == "computes":
            results = [out + y]
        if reason == "a view":
            results = [out[:8]]
        if reason == "expanded":
            results = [out[:8].expand(8, 8)]
        if reason == "returned twice":
            results = [out, out.view(8, 8)]
        if reason == "never written":
            results = [empty()]
        if reason == "elsewhere":
            torch.empty(SIZE, device="meta")
    with pytest.raises(ValueError, match=says):
        RecordedPass(tape, given, results)


def test_an_error_ends_the_writing(rng: np.random.Generator) -> None:
    """An exception inside of the pass reaches the caller, and nothing is written down any longer."""
    x = torch.randn(SIZE)
    with pytest.raises(RuntimeError, match="of the pass"), Tape(Kernels, x, [x]):
        raise RuntimeError("of the pass")
    assert Kernels.active is None
    assert torch.equal(x + x, 2 * x)
