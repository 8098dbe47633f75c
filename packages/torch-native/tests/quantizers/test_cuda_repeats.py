"""The CUDA quantizers again and again: on two streams, under load, with the same bytes and no more memory."""

from __future__ import annotations

import native_calls as native
import numpy as np
import pytest
import torch
from cuda_device import MARKS, SPLITS
from cuda_quantizers import LAYOUTS, K, assert_valid, every, launches, raw, rows

from octavo_conformance.cards.variants import RAGGED

pytestmark = [*MARKS, pytest.mark.usefixtures("no_flag_is_left")]


def test_two_streams_at_once(rng: np.random.Generator) -> None:
    """Each call's workspace and plan are its own (faults 34, 35: workspaces shared by streams)."""
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    spec = RAGGED["nvfp4.stochastic.hadamard"]
    problems = []
    for number, split in enumerate(SPLITS[:2]):
        x = rows(sizes=split)
        sizes = torch.tensor(split, device="cuda")
        dy = rows(columns=K // 2)
        expected = [native.quantize(x, spec, sizes, seed=number), native.dact_quantize(dy, x, spec, sizes, seed=number)]
        problems.append((x, dy, sizes, expected))
    torch.cuda.synchronize()
    results: list[list[list[native.Quantized]]] = [[], []]
    for _ in range(100):
        for number, stream in enumerate(streams):
            x, dy, sizes, _ = problems[number]
            with torch.cuda.stream(stream):
                pair = [
                    native.quantize(x, spec, sizes, seed=number),
                    native.dact_quantize(dy, x, spec, sizes, seed=number),
                ]
                results[number].append(pair)
    torch.cuda.synchronize()
    for number in range(2):
        used = sum(SPLITS[number])
        for pair in results[number][::9]:
            for ours, theirs in zip(pair, problems[number][3], strict=True):
                assert_valid(ours, theirs, used, f"stream {number}")


@pytest.mark.parametrize("layouts", LAYOUTS, ids="-".join)
@pytest.mark.parametrize("name", ["current.e4m3", "row.e4m3.pow2", "block.e4m3.pow2", "mxfp8.e4m3", "nvfp4.hadamard"])
def test_back_to_back(name: str, layouts: tuple[str, str], rng: np.random.Generator) -> None:
    """quantize and dequantize 400 times with nothing between them, under load (faults 30, 32, 33)."""
    spec, x, sizes = RAGGED[name], rows(sizes=SPLITS[0]), torch.tensor(SPLITS[0], device="cuda")
    first = native.quantize(x, spec, sizes, layouts=layouts).codes
    expected = [native.dequantize(first, direction) for direction in ("rowwise", "columnwise")]
    load, busy = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(400):
        with torch.cuda.stream(load):
            busy = busy @ busy * 1e-3
        q = native.quantize(x, spec, sizes, layouts=layouts).codes
        for direction, values in zip(("rowwise", "columnwise"), expected, strict=True):
            again = native.dequantize(q, direction)  # type: ignore[arg-type]
            wrong += (again.view(torch.int32) != values.view(torch.int32)).sum()
    assert int(wrong) == 0


@pytest.mark.parametrize("layouts", LAYOUTS, ids="-".join)
@pytest.mark.parametrize("name", RAGGED)
def test_a_thousand_repeats(name: str, layouts: tuple[str, str], rng: np.random.Generator) -> None:
    """Every output, dbias included, 1 000 times the same bytes (faults 22, 30, 31, 32, 41)."""
    x, dy, sizes = rows(sizes=SPLITS[0]), rows(columns=K // 2), torch.tensor(SPLITS[0], device="cuda")
    for what, call in launches(name, layouts).items():
        if what not in ("quantize", "dact"):
            continue
        first = every(call(x, dy, sizes))
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(1000):
            for plane, tensor in every(call(x, dy, sizes)).items():
                wrong += (raw(tensor) != raw(first[plane])).sum()
        assert int(wrong) == 0, what


def test_memory_stays_flat(rng: np.random.Generator) -> None:
    """Allocated memory after 1 000 calls is that after 10 (faults 52, 53)."""
    x, dy, sizes = rows(), rows(columns=K // 2), torch.tensor(SPLITS[0], device="cuda")
    made = launches("nvfp4.stochastic.hadamard", ("rows", "panels"))
    for _ in range(10):
        for call in made.values():
            call(x, dy, sizes)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(1000):
        for call in made.values():
            call(x, dy, sizes)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
