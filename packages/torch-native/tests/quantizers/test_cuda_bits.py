"""The CUDA quantizers through torch: bits of the CPU, for any strides, sizes and seeds, right or wrong."""

from __future__ import annotations

from typing import Any

import native_calls as native
import numpy as np
import pytest
import torch
from cuda_device import MARKS, SPLITS
from cuda_quantizers import LAYOUTS, K, M, assert_valid, raw, rows

from octavo_conformance.cards.variants import RAGGED, STACKED
from octavo_torch import check_errors
from octavo_torch.compiler.status import DeviceSizesError

pytestmark = [*MARKS, pytest.mark.usefixtures("no_flag_is_left")]


@pytest.mark.parametrize("layouts", LAYOUTS, ids="-".join)
@pytest.mark.parametrize("name", RAGGED)
def test_bits_of_the_cpu(name: str, layouts: tuple[str, str], problem: Any, same: Any) -> None:
    """Every kind of value and dtype, empty groups, NaN tails; the definition's bits and the CPU's (faults 6, 14, 15,
    17, 19, 24, 25, 56, 59, 64)."""
    for dtype in ("float32", "bfloat16", "float16"):
        for columns in (1, 77, 128, 272):
            drawn = problem(RAGGED[name], dtype=dtype, columns=columns)
            made = [
                native.quantize(
                    drawn.tensor(device), drawn.spec, drawn.group_sizes(device), layouts=layouts, amax=True,
                    dequantized=True, **drawn.arguments(device),
                )
                for device in ("cuda", "cpu")
            ]  # fmt: skip
            same(made[0].codes, drawn.expected(), f"{name} {layouts}: {drawn}")
            used = int(drawn.sizes.sum())
            copies = [value.dequantized[:used].cpu() for value in made]
            assert torch.equal(raw(copies[0]), raw(copies[1])), f"{name}: {drawn}"
            # no tolerance: a maximum is one of its elements, and which NaN it is has no meaning
            torch.testing.assert_close(made[0].amax.cpu(), made[1].amax, rtol=0, atol=0, equal_nan=True)
            for direction in ("rowwise", "columnwise"):
                for out in (torch.float32, torch.bfloat16, torch.float16):
                    values = [native.dequantize(value.codes, direction, dtype=out).cpu() for value in made]
                    assert torch.equal(raw(values[0]), raw(values[1])), f"{name} {direction} {out}: {drawn}"


@pytest.mark.parametrize("layouts", LAYOUTS, ids="-".join)
@pytest.mark.parametrize("name", STACKED)
def test_bits_of_matrices(name: str, layouts: tuple[str, str], problem: Any, same: Any) -> None:
    """Weights, all groups in one launch, both orientations."""
    for n, k in ((1, 40), (144, 272), (160, 129)):
        drawn = problem(STACKED[name], dtype="bfloat16", stacked=True, rows=n, columns=k, groups=3)
        made = native.quantize(drawn.tensor("cuda"), drawn.spec, layouts=layouts, **drawn.arguments("cuda"))
        same(made.codes, drawn.expected(), f"{name} {layouts}: {drawn}")


@pytest.mark.parametrize("name", ["mxfp8.e4m3", "block.e4m3.fp32", "row.e4m3.pow2", "current.e4m3", "nvfp4.hadamard"])
def test_strided_inputs(name: str, rng: np.random.Generator) -> None:
    """Transposed, sliced, expanded and oddly placed rows (faults 44, 45)."""
    sizes = torch.tensor(SPLITS[0], device="cuda")
    x = rows()
    wide = torch.full((M, 2 * K), torch.nan, dtype=x.dtype, device="cuda")
    wide[:, 16 : 16 + K] = x
    late = torch.full((M * K + 1,), torch.nan, dtype=x.dtype, device="cuda")
    late[1:] = x.reshape(-1)
    expected = native.quantize(x, RAGGED[name], sizes)
    views = {"transposed": x.T.contiguous().T, "slice": wide[:, 16 : 16 + K], "odd address": late[1:].view(M, K)}
    for what, view in views.items():
        assert_valid(native.quantize(view, RAGGED[name], sizes), expected, sum(SPLITS[0]), what)
    one = x[:1].expand(M, K)
    cloned = native.quantize(one.clone(memory_format=torch.contiguous_format), RAGGED[name], sizes)
    assert_valid(native.quantize(one, RAGGED[name], sizes), cloned, sum(SPLITS[0]), "expanded")


@pytest.mark.parametrize("sizes", [[400, 400, 0, 0, 0, 0], [33, -5, 10, 0, 0, 0], [1 << 62, 1 << 62, 3, 0, 0, 0]])
@pytest.mark.parametrize("name", ["current.e4m3", "row.e4m3.pow2", "block.e4m3.pow2", "mxfp8.e4m3", "nvfp4.hadamard"])
def test_bad_device_sizes_are_flagged(name: str, sizes: list[int], rng: np.random.Generator) -> None:
    """Sums past M, negative and huge sizes: cut, flagged, nothing written out of bounds (faults 61, 62)."""
    spec, x = RAGGED[name], rows()
    ends = np.minimum(np.cumsum([min(max(size, 0), M) for size in sizes]), M)
    right = np.diff(ends, prepend=0).tolist()
    for layouts in LAYOUTS:
        made = native.quantize(x, spec, torch.tensor(sizes, device="cuda"), layouts=layouts, amax=True)
        with pytest.raises(DeviceSizesError, match="cuda:0"):
            check_errors()
        assert made.codes.group_sizes.tolist() == right
        expected = native.quantize(x, spec, torch.tensor(right, device="cuda"), layouts=layouts, amax=True)
        assert_valid(made, expected, sum(right))
        check_errors()


def test_host_sizes_are_checked(rng: np.random.Generator) -> None:
    """A list or a CPU tensor raises before anything is launched, and otherwise gives the bits of device sizes."""
    spec, x = RAGGED["mxfp8.e4m3"], rows()
    with pytest.raises(ValueError, match="sum to 800"):
        native.quantize(x, spec, [400, 400])
    device = native.quantize(x, spec, torch.tensor(SPLITS[0], device="cuda"))
    for form in (SPLITS[0], torch.tensor(SPLITS[0]), torch.tensor(SPLITS[0], dtype=torch.int32, device="cuda")):
        assert_valid(native.quantize(x, spec, form), device, sum(SPLITS[0]))


def test_seeds_of_every_form(rng: np.random.Generator) -> None:
    """An integer, a host scalar, a device scalar: the same bits; a captured device seed gives others when it changes
    (faults 39, 40)."""
    spec, x = RAGGED["nvfp4.stochastic"], rows()
    sizes = torch.tensor(SPLITS[0], device="cuda")
    forms = (-9, torch.tensor(-9), torch.tensor(-9, device="cuda"), (1 << 64) - 9)
    made = [native.quantize(x, spec, sizes, seed=seed) for seed in forms]
    for other in made[1:]:
        assert_valid(other, made[0], sum(SPLITS[0]))
    seed = torch.tensor(-9, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = native.quantize(x, spec, sizes, seed=seed)
    graph.replay()
    assert_valid(captured, made[0], sum(SPLITS[0]))
    seed.fill_(10)
    graph.replay()
    assert_valid(captured, native.quantize(x, spec, sizes, seed=10), sum(SPLITS[0]))
    assert not torch.equal(raw(captured.codes.rowwise), raw(made[0].codes.rowwise))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one device")
def test_the_second_device(rng: np.random.Generator) -> None:
    """A tensor of another device than the current one is served there, on its own stream."""
    spec, x = RAGGED["mxfp8.e4m3"], rows()
    expected = native.quantize(x, spec, torch.tensor(SPLITS[0], device="cuda:0"))
    made = native.quantize(x.to("cuda:1"), spec, torch.tensor(SPLITS[0], device="cuda:1"))
    assert made.codes.rowwise.device == torch.device("cuda:1")
    assert torch.cuda.current_device() == 0
    assert_valid(made, expected, sum(SPLITS[0]))
