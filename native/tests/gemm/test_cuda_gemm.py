"""CUDA's grouped GEMMs within the bounds of their sums, on every tile; the same bits each time, whatever runs beside.

Operands come from the definition, or from the native quantizers, which are compared with it elsewhere. What no layout
defines, what no group holds, workspaces and results are NaN before each call. These tests skip where there is no
device.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

import octavo_native as native

torch = pytest.importorskip("torch", reason="torch holds the memory of the device")

import expected_planes  # noqa: E402  torch is there
import guarded  # noqa: E402
from device_gemms import UNWRITTEN, Chain, Prepared  # noqa: E402
from gemm_problems import (  # noqa: E402
    GEMMS,
    SIZES,
    Case,
    GemmName,
    make_problem,
    quantized_cases,
    random_values,
    unquantized_cases,
)
from problems import Place  # noqa: E402

from octavo_numerics import error_bound  # noqa: E402

pytestmark = pytest.mark.skipif(
    not (native.HAS_CUDA and torch.cuda.is_available()), reason="no CUDA kernels in this build, or no CUDA device"
)

CUDA = Place(cuda=True)
DTYPES_16 = ("bfloat16", "float16")
RAGGED = (0, 1, 17, 130, 0, 96, 300)
"""Groups without rows, of less than a tile, of more than one, and not a multiple of anything."""

ODD_SIDES = (
    *((144, 272), (16, 16), (80, 528), (272, 144), (768, 48), (48, 768), (640, 384), (32, 2064)),
    *((48, 4240), (4240, 48)),
)
"""(N, K): multiples of 16 that are none of 64, 128 or 256, and of 128 alone; one below a tile, one step past one; more
K-blocks than a warp has lanes."""


def kinds(gemm: GemmName) -> list[Case]:
    """Each way in which the kernels of a GEMM differ, once."""
    square = gemm != "wgrad"
    four = {"scaling": "nvfp4", "left_format": "e2m1", "right_format": "e2m1"}
    columns = (
        []
        if square
        else [
            Case(gemm=gemm, scaling="block", left_square=True),
            Case(gemm=gemm, scaling="block", right_square=True),
            Case(gemm=gemm, scaling="block", right_square=True, power_of_two=True, out_dtype="float32"),
        ]
    )
    return [
        *columns,
        Case(gemm=gemm),
        Case(gemm=gemm, dtype="float16", out_dtype="float16"),
        Case(gemm=gemm, scaling="delayed", left_format="e5m2"),
        Case(gemm=gemm, scaling="current", out_dtype="float32"),
        Case(gemm=gemm, scaling="current", fast_accumulation=True),
        Case(gemm=gemm, scaling="row", right_format="e5m2"),
        Case(gemm=gemm, scaling="block", power_of_two=True),
        Case(gemm=gemm, scaling="block", right_square=square, out_dtype="float32"),
        Case(gemm=gemm, scaling="mxfp8"),
        Case(gemm=gemm, **four, right_square=square, hadamard=not square),
    ]


KINDS = [case for gemm in GEMMS for case in kinds(gemm)]
WEIGHTS = kinds("wgrad")

every_kind = pytest.mark.parametrize("case", KINDS, ids=str)


def accumulation(case: Case) -> str:
    """How the kernels sum, for error_bound."""
    return "hopper_bf16" if case.scaling in (None, "mxfp8", "nvfp4") else "hopper_fp8"


def tiles(prepared: Prepared) -> range:
    """Numbers of the tiles, the model's choice first."""
    return range(-1, len(prepared.gemm.tiles()))


def check(prepared: Prepared) -> None:
    """Within the bound, and the same bits on every tile: each element is summed in one order, whatever the tile."""
    problem = prepared.problem
    first = prepared.result()
    for tile in tiles(prepared):
        out = prepared.result(tile)
        same = np.array_equal(out.view(np.uint8), first.view(np.uint8))
        if same and tile >= 0:
            continue
        name = "the chosen tile" if tile < 0 else prepared.gemm.tiles()[tile]
        found = problem.complaints(out, accumulation(problem.case))
        assert not found, f"{name}, sizes {problem.sizes}, N {problem.n}, K {problem.k}: {found[0]}"
        assert same, f"{name}: other bits than those of the call before, within the bound"


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of the operands' arrays that no layout defines are NaN codes and NaN scales."""
    for module in (expected_planes, guarded):
        monkeypatch.setattr(module, "POISON", UNWRITTEN)


@pytest.fixture(autouse=True)
def no_errors_left() -> Iterator[None]:
    """An error of a launch that nothing waited for belongs to this test."""
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@pytest.mark.parametrize("case", quantized_cases() + unquantized_cases(DTYPES_16, (*DTYPES_16, "float32")), ids=str)
def test_every_scaling_and_format_is_within_its_bound(rng: np.random.Generator, case: Case) -> None:
    """All pairs of formats, square weights, Hadamard data, dtypes; ragged groups, a NaN tail (faults.md 3, 8, 12)."""
    check(Prepared(make_problem(rng, case, RAGGED, 144, 272, tail=21), CUDA))


@pytest.mark.parametrize(("n", "k"), ODD_SIDES)
@every_kind
def test_sides_that_fill_no_tile(rng: np.random.Generator, case: Case, n: int, k: int) -> None:
    """They leave part of a tile, of a step along K and of a scale's block (faults.md 20, 24, 25, 59)."""
    check(Prepared(make_problem(rng, case, (70, 0, 129), n, k, tail=3), CUDA))


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@every_kind
def test_sizes_of_every_kind(rng: np.random.Generator, case: Case, sizes: tuple[int, ...]) -> None:
    """One group, empty ones, negative ones, a sum past M, with a tail and without (faults.md 1 to 6, 16, 61)."""
    for tail in (0, 21):
        check(Prepared(make_problem(rng, case, sizes, 80, 144, tail=tail), CUDA))


@every_kind
def test_groups_of_1_to_130_rows(rng: np.random.Generator, case: Case) -> None:
    """Every remainder of a tile's rows, in random order (faults.md 17, 19)."""
    sizes = tuple(int(size) for size in rng.permutation(np.arange(1, 131)))
    check(Prepared(make_problem(rng, case, sizes, 48, 80, tail=5), CUDA))


@every_kind
def test_1024_groups(rng: np.random.Generator, case: Case) -> None:
    """More groups than rows, most of them empty (faults.md 6)."""
    sizes = tuple(int(size) for size in rng.choice([0, 0, 0, 1, 2], 1024))
    check(Prepared(make_problem(rng, case, sizes, 48, 80, tail=5), CUDA))


@every_kind
def test_operands_without_rows(rng: np.random.Generator, case: Case) -> None:
    """M = 0, where frameworks give null pointers: nothing but wgrad's zeros is written (faults.md 6)."""
    check(Prepared(make_problem(rng, case, (0, 0), 64, 48, tail=0), CUDA))


@every_kind
def test_what_a_group_holds_stays_in_it(rng: np.random.Generator, case: Case) -> None:
    """NaN in a row of one group reaches no other group, and no further than the definition says (faults.md 11, 14)."""
    sizes, n, k = (60, 70, 65), 80, 144
    columns = k if case.gemm == "fprop" else n
    left = random_values(rng, (sum(sizes) + 9, columns), case.dtype)
    left[60 + int(rng.integers(0, 70)), int(rng.integers(0, columns))] = np.nan
    prepared = Prepared(make_problem(rng, case, sizes, n, k, tail=9, left=left), CUDA)
    check(prepared)
    assert np.isnan(prepared.result().astype(np.float32)).any()


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("case", WEIGHTS, ids=str)
def test_weight_gradients_are_added_to_what_there_is(rng: np.random.Generator, case: Case, out_dtype: str) -> None:
    """In fp32, rounded once; a group without rows keeps its bits, -0 among them (faults.md 1, 7)."""
    case = replace(case, accumulate=True, out_dtype=out_dtype)
    problem = make_problem(rng, case, RAGGED, 144, 272, tail=21)
    assert problem.accumulator is not None
    problem.accumulator[0, :, ::3] = -0.0
    check(Prepared(problem, CUDA))


@pytest.mark.parametrize("bias_scales", [False, True])
@pytest.mark.parametrize("bias", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("case", kinds("fprop") + kinds("dgrad"), ids=str)
def test_biases_are_added_before_the_rounding(
    rng: np.random.Generator, case: Case, bias: str, bias_scales: bool
) -> None:
    """Each group's own bias, times the row's scale where there are scales; the tail stays +0.

    dgrad's is the bias of a layer whose weight lies as [G, K, N].
    """
    problem = make_problem(rng, case, RAGGED, 144, 80, tail=21, bias=bias, bias_scales=bias_scales)
    if problem.bias_scales is not None:
        problem.bias_scales[sum(problem.real) :] = np.nan
    check(Prepared(problem, CUDA))


@every_kind
def test_results_with_strides(rng: np.random.Generator, case: Case) -> None:
    """Rows and matrices apart: what lies between them is not written (faults.md 58). Unquantized operands likewise."""
    strides = {"left_stride": 296, "right_stride": 312} if case.scaling is None else {}
    problem = make_problem(rng, case, RAGGED, 144, 272, tail=21, **strides)
    check(Prepared(problem, CUDA, gap=24, group_gap=40 if case.gemm == "wgrad" else 0))


@every_kind
def test_results_have_the_same_bits_each_time(rng: np.random.Generator, case: Case) -> None:
    """100 calls, each tile in turn: no atomics, no race that a tolerance would hide (faults.md 22, 30, 32)."""
    prepared = Prepared(make_problem(rng, case, (200, 0, 129, 700, 33), 384, 272, tail=7), CUDA)
    prepared.run()
    want, different = prepared.out.held.inside.clone(), torch.zeros((), dtype=torch.bool, device=CUDA.device)
    numbers = tiles(prepared)
    for call in range(100):
        prepared.run(numbers[call % len(numbers)])
        different |= prepared.differs(want)
    assert not different.item()


def test_streams_beside_each_other(rng: np.random.Generator) -> None:
    """Four problems of different kinds on four streams at once, 50 times: nothing is shared (faults.md 34, 35)."""
    cases = [KINDS[int(i)] for i in rng.choice(len(KINDS), 4, replace=False)]
    prepared = [Prepared(make_problem(rng, case, RAGGED, 272, 400, tail=21), CUDA) for case in cases]
    wanted, streams, flags = [], [], []
    for one in prepared:
        one.run()
        wanted.append(one.out.held.inside.clone())
        streams.append(torch.cuda.Stream())
        flags.append(torch.zeros((), dtype=torch.bool, device=CUDA.device))
    torch.cuda.synchronize()
    for _ in range(50):
        for one, want, stream, flag in zip(prepared, wanted, streams, flags, strict=True):
            with torch.cuda.stream(stream):
                one.run()
                flag |= one.differs(want)
    torch.cuda.synchronize()
    assert [str(case) for case, flag in zip(cases, flags, strict=True) if flag.item()] == []


def test_a_thread_that_has_not_used_cuda(rng: np.random.Generator) -> None:
    """A GEMM may be the first that a thread does with CUDA, as in autograd's: the driver then has no context there."""
    case = next(case for case in KINDS if case.scaling is None)
    prepared = Prepared(make_problem(rng, case, RAGGED, 272, 400, tail=21), CUDA)
    prepared.out.refill()
    stream = torch.cuda.current_stream().cuda_stream
    with ThreadPoolExecutor(1) as pool:
        pool.submit(prepared.gemm.run, **prepared.arguments, stream=stream).result()
    complaints = prepared.problem.complaints(prepared.out.result(), accumulation(case))
    assert not complaints, complaints[0]


# ---- behind the native quantizers


def random_chain(case: Case, sizes: list[int], rows: int, n: int, k: int, place: Place = CUDA) -> Chain:
    """Random operands on the device; the rows past the sum of `sizes` are NaN."""
    groups, device = len(sizes), place.device
    shapes = {"x": (rows, k), "dy": (rows, n), "w": (groups, n, k)}
    left, right = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}[case.gemm]
    values = {
        name: torch.randn(shapes[name], dtype=getattr(torch, case.dtype), device=device) for name in (left, right)
    }
    for name in {left, right} - {"w"}:
        values[name][sum(sizes) :] = torch.nan
    held = torch.tensor(sizes, dtype=torch.int64, device=device)
    return Chain(case, values[left], values[right], held, place)


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


@every_kind
def test_sides_of_real_layers(rng: np.random.Generator, case: Case) -> None:
    """Thousands of rows, features and steps along K: every SM has several tiles, every ring of buffers goes round."""
    torch.manual_seed(int(rng.integers(1 << 32)))
    sizes = [int(size) for size in rng.multinomial(2900, rng.dirichlet(np.ones(6)))]
    chain = random_chain(case, sizes, 3000, 1536, 2048)
    chain.run()
    assert chain_complaints(chain, sizes) == []


@every_kind
def test_gemms_right_behind_their_quantizers(rng: np.random.Generator, case: Case) -> None:
    """400 times without a wait, two inputs in turn: a GEMM that begins too early reads NaN (faults.md 32, 33)."""
    torch.manual_seed(int(rng.integers(1 << 32)))
    sizes = [60, 0, 200, 131, 7]
    chain = random_chain(case, sizes, 410, 272, 528)
    inputs = [[operand.values.clone() for operand in chain.operands]]
    # not both turned round along K, which would leave every product as it is
    inputs.append([-inputs[0][0], *inputs[0][1:]])
    wanted = []
    for values in inputs:
        for operand, value in zip(chain.operands, values, strict=True):
            operand.values.copy_(value)
        chain.run()
        torch.cuda.synchronize()
        wanted.append(chain.bits.clone())
    different = torch.zeros((), dtype=torch.bool, device=CUDA.device)
    for turn in range(400):
        for operand, value in zip(chain.operands, inputs[turn % 2], strict=True):
            operand.values.copy_(value)
        chain.run()
        different |= (chain.bits != wanted[turn % 2]).any()
    assert not different.item()
    assert not (wanted[0] == wanted[1]).all().item()
    assert not chain.out[: sum(sizes)].isnan().any().item()


@every_kind
def test_graphs_replay_with_other_sizes_and_values(rng: np.random.Generator, case: Case) -> None:
    """Plan, quantize and multiply captured once, replayed with 50 other splits and operands: the bits of calls that
    are not captured (faults.md 35, 36, 37)."""
    torch.manual_seed(int(rng.integers(1 << 32)))
    rows, groups = 300, 5
    chain = random_chain(case, [0] * groups, rows, 144, 272)
    for operand in chain.operands:
        operand.values.normal_()
    chain.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain.run()
    for replay in range(50):
        split = rng.multinomial(int(rng.integers(0, rows + 1)), rng.dirichlet(np.full(groups, 0.5)))
        if replay % 10 == 0:
            split[:] = (0, rows + 50, -4, 3, 0) if replay else 0
        if replay % 7 == 0:
            for operand in chain.operands:
                operand.values.normal_()
        chain.sizes.copy_(torch.from_numpy(split.astype(np.int64)))
        graph.replay()
        replayed = chain.bits.clone()
        chain.run()
        assert torch.equal(replayed, chain.bits), f"replay {replay} with sizes {split.tolist()}"


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
