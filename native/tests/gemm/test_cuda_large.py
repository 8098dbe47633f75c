"""CUDA's grouped GEMMs of the sizes of real layers, and of more than 2^31 elements, within the bounds of their sums.

Operands come from the native quantizers, which are compared with the definition elsewhere. These tests skip where there
is no device.
"""

from __future__ import annotations

import numpy as np
import pytest
from devices import needs_device

torch = pytest.importorskip("torch", reason="torch holds the memory of the device")

from device_gemms import Chain  # noqa: E402  torch is there
from gemm_kinds import accumulation, every_kind, random_chain  # noqa: E402
from gemm_problems import Case, GemmName  # noqa: E402
from problems import CUDA  # noqa: E402

from octavo_numerics import error_bound  # noqa: E402

pytestmark = [
    needs_device,
    pytest.mark.usefixtures("poison", "no_errors_left"),
]


def chain_complaints(chain: Chain, sizes: list[int]) -> list[str]:
    """Groups of the result that are outside the bound, in words."""
    case, found = chain.case, []
    a, b = (operand.exact().float().cpu().numpy() for operand in chain.operands)
    out = chain.out.float().cpu().numpy()
    starts = np.cumsum([0, *sizes])
    padded = np.cumsum([0, *(-(-size // 16) * 16 for size in sizes)]) if case.hadamard else starts
    for group, size in enumerate(sizes):
        rows = slice(starts[group], starts[group + 1])
        inside = slice(padded[group], padded[group + 1])
        if case.gemm == "wgrad":
            mine, left, right = out[group], a[inside].T, b[inside].T
        else:
            w = b.reshape(len(sizes), -1, b.shape[-1])[group]
            mine, left, right = out[rows], a[rows], w if case.gemm == "fprop" else w.T
        if not size:
            found += [f"group {group} has no rows and its result is not 0"] if mine.any() else []
            continue
        bound = error_bound(
            case.recipe,
            left.shape[1],
            gemm=case.gemm,
            out_dtype=case.out_dtype,  # type: ignore[arg-type]
            accumulation=accumulation(case),  # type: ignore[arg-type]
        )
        report = bound.check(mine, left, right)
        if not report.passed:
            found.append(f"group {group} of {size} rows: {report.describe()}")
    return found


def drawn_sizes(rng: np.random.Generator) -> list[int]:
    """Of six groups, 2900 rows together."""
    return [int(size) for size in rng.multinomial(2900, rng.dirichlet(np.ones(6)))]


def check_sizes(rng: np.random.Generator, case: Case, sizes: list[int], n: int, k: int) -> None:
    """The result of random operands with 100 rows past the last group is within its bound."""
    torch.manual_seed(int(rng.integers(1 << 32)))
    chain = random_chain(case, sizes, sum(sizes) + 100, n, k)
    chain.run()
    assert chain_complaints(chain, sizes) == []


@every_kind
def test_sides_of_real_layers(rng: np.random.Generator, case: Case) -> None:
    """Thousands of rows, features and steps along K: every SM has several tiles, every ring of buffers goes round."""
    check_sizes(rng, case, drawn_sizes(rng), 1536, 2048)


@pytest.mark.parametrize("depth", [192, 256, 384, 512])
@every_kind
def test_tiles_of_few_k_blocks(rng: np.random.Generator, case: Case, depth: int) -> None:
    """A tile's results leave from stages that the next tile needs at once, and every SM has several tiles."""
    if case.gemm == "wgrad":
        check_sizes(rng, case, [depth, 0, depth - 1, depth - 37, depth, 3 * depth], 1536, 2048)
    else:
        check_sizes(rng, case, drawn_sizes(rng), *((4096, depth) if case.gemm == "fprop" else (depth, 4096)))


PAST = 131_088, 16_400
"""Two sides whose product is just past 2^31."""

LARGE: dict[str, tuple[GemmName, tuple[int, ...], int, int, int]] = {
    "x": ("fprop", (PAST[0] - 90, 0, 70), PAST[0], 16, PAST[1]),
    "w": ("fprop", (30, 0, 70), 120, 65_552, PAST[1]),
    "y": ("fprop", (PAST[0] - 90, 0, 70), PAST[0], PAST[1], 16),
    "dx": ("dgrad", (PAST[0] - 90, 0, 70), PAST[0], 16, PAST[1]),
    "dw": ("wgrad", (30, 70), 120, 65_552, PAST[1]),
    "x and dw's sums": ("wgrad", (PAST[0] - 90, 0, 70), PAST[0], 16, PAST[1]),
}
"""The array that has more than 2^31 elements: GEMM, sizes, rows, N, K."""


@pytest.mark.slow
@pytest.mark.parametrize("scaling", [None, "delayed", "block", "mxfp8"])
@pytest.mark.parametrize("array", LARGE)
def test_arrays_of_more_than_2_31_elements(rng: np.random.Generator, array: str, scaling: str | None) -> None:
    """No offset is held in 32 bits: the first and the last rows and columns of every group (faults.md 26 to 29)."""
    gemm, sizes, rows, n, k = LARGE[array]
    needed = 30 << 30
    if torch.cuda.mem_get_info()[0] < needed:
        pytest.skip(f"{needed >> 30} GiB of device memory are not free")
    torch.manual_seed(int(rng.integers(1 << 32)))
    case = Case(gemm=gemm, scaling=scaling, power_of_two=True)  # scales of powers of two: bf16 holds the values
    chain = random_chain(case, list(sizes), rows, n, k)
    chain.run()
    a, b = (operand.exact("bfloat16") for operand in chain.operands)
    start = 0
    for group, size in enumerate(sizes):
        mine = slice(start, start + size)
        start += size
        out = chain.out[group] if gemm == "wgrad" else chain.out[mine]
        if not size:
            assert not out.any().item()
            continue
        left = a[mine].T if gemm == "wgrad" else a[mine]
        w = None if gemm == "wgrad" else b.view(len(sizes), n, k)[group]
        right = b[mine].T if w is None else w if gemm == "fprop" else w.T
        picked = [torch.tensor([*range(8), *range(-40, 0)], device=CUDA.device) % count for count in out.shape]
        report = error_bound(
            case.recipe,
            left.shape[1],
            gemm=case.gemm,
            accumulation=accumulation(case),  # type: ignore[arg-type]
        ).check(
            out[picked[0]][:, picked[1]].double().cpu().numpy(),
            left[picked[0]].double().cpu().numpy(),
            right[picked[1]].double().cpu().numpy(),
            zero_mean=False,
        )
        assert report.passed, f"group {group}: {report.describe()}"
    if gemm != "wgrad":
        assert not chain.out[start:].view(torch.uint8).any().item()
