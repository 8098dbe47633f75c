"""CUDA kernels against their CPU twins bit for bit: the plan, dequantize, conversions; norm statistics and dbias.

The CPU kernels are compared with the definition in the other files. These tests skip where there is no device.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import octavo_native as native
from octavo_native import layouts

torch = pytest.importorskip("torch", reason="torch holds the memory of the device")

from problems import (  # noqa: E402  it imports torch
    DIRECTIONS,
    NATIVE_LAYOUT,
    POISON,
    SPECS,
    WIDTH,
    Extras,
    Place,
    Plane,
    Shape,
    address,
    filled,
    new_plane,
    quantize,
    quantizer,
    valid,
)
from quantize_call import run_quantizer  # noqa: E402

pytestmark = pytest.mark.skipif(
    not (native.HAS_CUDA and torch.cuda.is_available()), reason="no CUDA kernels in this build, or no CUDA device"
)

CPU, CUDA = Place(cuda=False), Place(cuda=True)
GROUPS = (1, 2, 5, 8, 64, 128, 1000, 1024, 1100)
VECTORS = 100_000
BATCH = 1000
EDGE_SIZES = (0, 1, 15, 16, 17, 31, 32, 33, 127, 128, 129, 300)
COLUMNS = (1, 3, 16, 36, 64, 100, 130, 264, 520)


def spec_name(spec: dict[str, Any]) -> str:
    """A test's name."""
    return "-".join(str(value) for value in spec.values())


def size_vectors(rng: np.random.Generator, count: int, groups: int, rows: int, wide: bool) -> np.ndarray:
    """Group sizes of every kind: fair, skewed, around block edges, negative, past the rows, the integers' ends."""
    dtype = np.int64 if wide else np.int32
    ends = np.iinfo(dtype)
    share = rows // groups
    sizes = rng.integers(0, 2 * share + 2, (count, groups))
    kind = rng.integers(0, 6, (count, 1))
    sizes = np.where(kind == 1, rng.choice(EDGE_SIZES, (count, groups)), sizes)
    sizes = np.where((kind == 2) & (rng.random((count, groups)) < 0.7), 0, sizes)
    sizes = np.where(kind == 3, share, sizes)
    bad = np.array([ends.min, ends.min + 1, -1, rows, rows + 1, ends.max - 1, ends.max], dtype=np.int64)
    sizes = np.where((kind == 4) & (rng.random((count, groups)) < 2 / groups), rng.choice(bad, (count, groups)), sizes)
    anything = rng.integers(ends.min, ends.max, (count, groups), dtype=np.int64, endpoint=True)
    return np.where(kind == 5, anything, sizes).astype(dtype)


def plans(place: Place, sizes: np.ndarray, rows: list[int], words: int) -> tuple[np.ndarray, np.ndarray]:
    """One plan a row of `sizes`, each in `words` poisoned words, and the status words; one wait for all of them."""
    count, groups = sizes.shape
    held = torch.from_numpy(sizes).to(place.device)
    out = torch.full((count, words), POISON, dtype=torch.int64, device=place.device)
    status = torch.full((count,), 4, dtype=torch.int32, device=place.device)
    stream = torch.cuda.current_stream().cuda_stream if place.cuda else 0
    for i in range(count):
        native.plan(
            cuda=place.cuda,
            stream=stream,
            sizes=held.data_ptr() + i * groups * sizes.itemsize,
            sizes_are_64=sizes.itemsize == 8,
            groups=groups,
            rows=rows[i],
            plan=out.data_ptr() + 8 * i * words,
            status=status.data_ptr() + 4 * i,
        )
    return out.cpu().numpy(), status.cpu().numpy()


def test_plans_of_fuzzed_sizes_are_those_of_the_cpu(rng: np.random.Generator) -> None:
    """faults.md 16, 61 and "device-side group offsets": no size, however bad, leads a plan astray; bad ones are told.

    100 000 vectors; whole plans are compared, and the words after them stay untouched.
    """
    for batch in range(VECTORS // BATCH):
        groups, wide = GROUPS[batch % len(GROUPS)], bool(rng.integers(2))
        most = int(rng.choice([0, 100, 2000, 20_000, 100_000]))
        rows = [int(n) for n in rng.integers(0, most, BATCH, endpoint=True)]
        sizes = size_vectors(rng, BATCH, groups, most, wide)
        words = layouts.round_up(native.plan_words(most, groups), 4) + 4
        ours, status = plans(CUDA, sizes, rows, words)
        theirs, their_status = plans(CPU, sizes, rows, words)
        different = np.flatnonzero((ours != theirs).any(axis=1) | (status != their_status))
        if different.size:
            first = int(different[0])
            word = int(np.flatnonzero(ours[first] != theirs[first])[0]) if (ours[first] != theirs[first]).any() else -1
            pytest.fail(f"plan of {sizes[first].tolist()} in {rows[first]} rows differs from word {word} on")


@pytest.mark.parametrize("groups", [2048, 5000, 65_536])
def test_plans_of_many_groups_are_those_of_the_cpu(rng: np.random.Generator, groups: int) -> None:
    """Past 1 024 groups the kernel works in chunks with carried sums; equal sizes keep the order of their numbers."""
    rows = 1 << 21
    sizes = np.concatenate([size_vectors(rng, 6, groups, rows, True), np.full((1, groups), 7, dtype=np.int64)])
    words = layouts.round_up(native.plan_words(rows, groups), 4) + 4
    ours, status = plans(CUDA, sizes, [rows] * len(sizes), words)
    theirs, their_status = plans(CPU, sizes, [rows] * len(sizes), words)
    assert (ours == theirs).all()
    assert (status == their_status).all()


def random_shapes(rng: np.random.Generator, spec: dict[str, Any]) -> list[Shape]:
    """Ragged rows with a tail and with bad sizes, and stacked matrices where they are defined."""
    ragged = [tuple(int(size) for size in rng.choice(EDGE_SIZES, 6)) for _ in range(2)]
    shapes = [Shape(sizes, int(rng.choice(COLUMNS))) for sizes in (*ragged, (0, 0), (-5, 140, 1 << 40, 9))]
    if not spec.get("hadamard"):
        matrix_rows = int(rng.choice(EDGE_SIZES[1:]))
        shapes.append(Shape((matrix_rows,) * 3, int(rng.choice(COLUMNS)), matrix_rows=matrix_rows))
    return shapes


def random_plane(rng: np.random.Generator, spec: dict[str, Any], shape: Shape, direction: str, layout: str) -> Plane:
    """Random codes, and random scales of every kind: NaN, infinite, subnormal, of either sign."""
    plane = new_plane(spec, shape, direction, layout, CPU)
    high = 16 if spec["format"] == "e2m1" and layout == layouts.PLAIN else 256
    plane.codes.copy_(torch.from_numpy(rng.integers(0, high, plane.codes.numel(), dtype=np.uint8)))
    scales = rng.integers(0, 256, plane.scales.numel(), dtype=np.uint8)
    if WIDTH[spec["scaling"]] == 4:
        ordinary = np.exp2(rng.uniform(-20, 20, scales.size // 4)).astype(np.float32)
        scales = np.where(rng.random(ordinary.size) < 0.8, ordinary, scales.view(np.float32)).view(np.uint8)
    plane.scales.copy_(torch.from_numpy(scales))
    if plane.factor is not None:
        factors = np.exp2(rng.uniform(-20, 20, len(shape.sizes))).astype(np.float32)
        factors[rng.random(factors.size) < 0.1] = np.nan
        plane.factor.copy_(torch.from_numpy(factors.view(np.uint8)))
    return plane


def moved(plane: Plane, place: Place) -> Plane:
    """The same arrays on `place`."""
    factor = None if plane.factor is None else plane.factor.to(place.device)
    codes, scales = plane.codes.to(place.device), plane.scales.to(place.device)
    return Plane(plane.direction, plane.layout, codes, scales, factor)


def sides_of(shape: Shape, direction: str, place: Place) -> dict[str, Any]:
    """Arguments that dequantize and convert share."""
    return {
        "cuda": place.cuda,
        "stream": torch.cuda.current_stream().cuda_stream if place.cuda else 0,
        "direction": native.DIRECTIONS[direction],
        "cols": shape.cols,
        "plan": address(shape.plan(place)),
        **shape.arguments,
    }


def dequantized(
    spec: dict[str, Any], shape: Shape, source: Plane, dtype: str, panels: bool, place: Place
) -> np.ndarray:
    """Bytes of the values, poison where nothing is written."""
    plane = moved(source, place)
    if panels:
        count = layouts.panel_bound(shape.rows, len(shape.sizes), shape.matrix_rows) * layouts.PANEL_ROWS * shape.cols
    else:
        padded = spec.get("hadamard") and source.direction == "columnwise"
        rows = layouts.block_bound(shape.rows, len(shape.sizes), 16) * 16 if padded else shape.rows
        count = rows * shape.cols
    out = filled((count,), 4 if dtype == "float32" else 2, place)
    quantizer(spec).dequantize(
        **sides_of(shape, source.direction, place),
        codes=address(plane.codes),
        scales=address(plane.scales),
        global_=address(plane.factor),
        layout=int(source.layout != layouts.PLAIN),
        out=address(out),
        out_dtype=native.DTYPES[dtype],
        out_layout=int(panels),
    )
    result: np.ndarray = out.cpu().numpy()
    return result


def converted(spec: dict[str, Any], shape: Shape, source: Plane, place: Place) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of codes and scales in the other layout, poison where nothing is written."""
    plane = moved(source, place)
    to = NATIVE_LAYOUT[source.direction] if source.layout == layouts.PLAIN else layouts.PLAIN
    into = new_plane(spec, shape, source.direction, to, place)
    quantizer(spec).convert(
        **sides_of(shape, source.direction, place),
        to=int(to != layouts.PLAIN),
        codes=address(plane.codes),
        scales=address(plane.scales),
        into_codes=address(into.codes),
        into_scales=address(into.scales),
    )
    return into.codes.cpu().numpy(), into.scales.cpu().numpy()


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("spec", SPECS, ids=spec_name)
def test_dequantized_values_are_those_of_the_cpu(
    rng: np.random.Generator, spec: dict[str, Any], direction: str
) -> None:
    """Every code, scale, layout and dtype, NaN included; tails are zeros, unused panels left alone (faults.md 8)."""
    for shape in random_shapes(rng, spec):
        for layout in (layouts.PLAIN, NATIVE_LAYOUT[direction]):
            plane = random_plane(rng, spec, shape, direction, layout)
            for panels in (False, True) if direction == "columnwise" else (False,):
                for dtype in native.DTYPES:
                    ours, theirs = (dequantized(spec, shape, plane, dtype, panels, at) for at in (CUDA, CPU))
                    assert (ours == theirs).all(), f"{shape.sizes} x {shape.cols}, {layout} to panels {panels}, {dtype}"


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("spec", SPECS, ids=spec_name)
def test_converted_planes_are_those_of_the_cpu(rng: np.random.Generator, spec: dict[str, Any], direction: str) -> None:
    """Codes and scales both ways; what no group holds is neither read nor written (faults.md 13, 59)."""
    for shape in random_shapes(rng, spec):
        for layout in (layouts.PLAIN, NATIVE_LAYOUT[direction]):
            plane = random_plane(rng, spec, shape, direction, layout)
            ours, theirs = (converted(spec, shape, plane, at) for at in (CUDA, CPU))
            for mine, other in zip(ours, theirs, strict=True):
                assert (mine == other).all(), f"{shape.sizes} x {shape.cols} from {layout}"


def on_bytes(call: Any, source: np.ndarray, size: int, place: Place, offset: int, **sides: Any) -> np.ndarray:
    """`size` bytes that `call` makes of `source`, which begins `offset` bytes past an aligned address."""
    held = torch.empty(source.size + offset, dtype=torch.uint8, device=place.device)
    held[offset:] = torch.from_numpy(source).to(place.device)
    out = filled((size,), 1, place)
    stream = torch.cuda.current_stream().cuda_stream if place.cuda else 0
    call(cuda=place.cuda, stream=stream, from_=address(held) + offset if source.size else 0, into=address(out), **sides)
    result: np.ndarray = out.cpu().numpy()
    return result


@pytest.mark.parametrize("to_swizzled", [True, False])
def test_swizzled_scales_are_those_of_the_cpu(rng: np.random.Generator, to_swizzled: bool) -> None:
    """Sides that fill no tile, strips of eight tiles and what is left of them, odd addresses (faults.md 13)."""
    for _ in range(60):
        outer, blocks = int(rng.integers(0, 600)), int(rng.choice([1, 3, 4, 6, 28, 31, 32, 64, 68, 224]))
        plain, swizzled = outer * blocks, layouts.round_up(outer, 128) * layouts.round_up(blocks, 4)
        read, written = (plain, swizzled) if to_swizzled else (swizzled, plain)
        source, offset = rng.integers(0, 256, read, dtype=np.uint8), int(rng.integers(0, 2))
        sides = {"outer": outer, "blocks": blocks, "to_swizzled": to_swizzled}
        ours, theirs = (on_bytes(native.swizzle_scales, source, written, at, offset, **sides) for at in (CUDA, CPU))
        assert (ours == theirs).all(), sides


@pytest.mark.parametrize("pack", [True, False])
def test_packed_codes_are_those_of_the_cpu(rng: np.random.Generator, pack: bool) -> None:
    """Odd columns keep half a byte unused; rows are packed one by one."""
    for _ in range(60):
        rows, cols = int(rng.integers(0, 200)), int(rng.choice([1, 2, 7, 16, 33, 64, 130, 512]))
        one, two = rows * cols, rows * layouts.ceil_div(cols, 2)
        read, written = (one, two) if pack else (two, one)
        source, offset = rng.integers(0, 16 if pack else 256, read, dtype=np.uint8), int(rng.integers(0, 2))
        sides = {"rows": rows, "cols": cols, "pack": pack}
        ours, theirs = (on_bytes(native.pack_e2m1, source, written, at, offset, **sides) for at in (CUDA, CPU))
        assert (ours == theirs).all(), sides


@pytest.mark.parametrize("dtype", native.DTYPES)
def test_expanded_mxfp4_is_that_of_the_cpu(rng: np.random.Generator, dtype: str) -> None:
    """Every byte with every scale, counts that fill no block of threads, and millions."""
    for blocks in (1, 3, 255, 257, 1 << 18, *(int(count) for count in rng.integers(1, 5000, 5))):
        codes = rng.integers(0, 256, (blocks, 16), dtype=np.uint8)
        scales = rng.integers(0, 256, blocks, dtype=np.uint8)
        results = []
        for place in (CUDA, CPU):
            held = [torch.from_numpy(array).to(place.device) for array in (codes, scales)]
            out = filled((blocks, 32), 4 if dtype == "float32" else 2, place)
            stream = torch.cuda.current_stream().cuda_stream if place.cuda else 0
            native.expand_mxfp4(
                cuda=place.cuda, stream=stream, codes=address(held[0]), scales=address(held[1]), blocks=blocks,
                out=address(out), out_dtype=native.DTYPES[dtype],
            )  # fmt: skip
            results.append(out.cpu().numpy())
        assert (results[0] == results[1]).all(), blocks


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_weights_rounded_to_mxfp4_have_the_bits_of_the_cpu(rng: np.random.Generator, dtype: str) -> None:
    """Every bf16 and millions of fp32, magnitudes sorted and mixed; columns that kernels load whole, and others."""
    spec = {"scaling": "block", "format": "e4m3", "square": True, "power_of_two": True, "operand": "w", "mxfp4": True}
    for cols, count in (
        (128, 1 << 16),
        (96, 96 << 10),
        (37, 37 << 10),
        (2048, 1 << (21 if dtype == "float32" else 16)),
    ):
        bits = rng.integers(0, 1 << 31, count, dtype=np.uint32)
        if dtype == "bfloat16":
            bits = (np.arange(count, dtype=np.uint32) & 0x7FFF) << 16
        finite = np.where(bits >= 0x7F800000, bits & 0x3FFFFFFF, bits)
        signs = rng.integers(0, 2, bits.shape, dtype=np.uint32) << 31
        for part in (np.sort(bits), np.sort(finite), rng.permutation(finite), rng.permutation(bits)):
            x = torch.from_numpy((part | signs).view(np.float32).reshape(-1, cols)).to(getattr(torch, dtype))
            for rows in (1, 16):  # of a matrix: a block of its own for each row, and for several
                shape = Shape((0,) * (x.shape[0] // rows), cols, matrix_rows=rows)
                planes = dict(zip(DIRECTIONS, ([layouts.PLAIN] * 2, NATIVE_LAYOUT.values())[rows > 1], strict=True))
                ours, theirs = (
                    quantize(spec, shape, x.to(at.device), dtype, planes, at, Extras()) for at in (CUDA, CPU)
                )
                for mine, other in zip(ours[0], theirs[0], strict=True):
                    for one, two in zip(valid(spec, shape, mine), valid(spec, shape, other), strict=True):
                        assert (one == two).all(), f"{cols} columns, {rows} rows, {mine.direction}"


def run_on_device(
    shape: Shape, x: Any, dtype: str, cols: int, scaling: str = "mxfp8", **arguments: int | float
) -> None:
    """Quantize rows of `x` on the device, for an output that is among `arguments`."""
    made_by = quantizer({"scaling": scaling, "format": "e4m3"})
    plane = new_plane({"scaling": scaling, "format": "e4m3"}, shape, "rowwise", layouts.PLAIN, CUDA)
    sides = {"cuda": True, "dtype": native.DTYPES[dtype], "cols": cols, **shape.arguments}
    kinds = {name: arguments[name] for name in ("prologue", "activation", "norm") if name in arguments}
    sums = {name: name in arguments for name in ("dbias", "dprobs")}
    # workspace_bytes is told nothing of addresses: a prologue's result is kept in it where they are not aligned
    size = made_by.workspace_bytes(**sides, **kinds, rowwise=True, columnwise=False, **sums) + x.nbytes + 256
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
    run_quantizer(
        made_by,
        **sides,
        **arguments,
        x=address(x),
        row_stride=x.stride(0),
        row_codes=address(plane.codes),
        row_scales=address(plane.scales),
        plan=address(shape.plan(CUDA)),
        stream=torch.cuda.current_stream().cuda_stream,
        workspace=address(workspace),
        workspace_bytes=size,
    )
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("cols", [64, 2040, 2048, 7168, 7172])
def test_norm_statistics_are_near_those_of_float64(rng: np.random.Generator, cols: int, norm: str, dtype: str) -> None:
    """Within the error of the sums' order: strands of C / (8 * 32) elements, then 8 strands and 256 threads pairwise.

    Each addition costs 2^-24 of the sum of magnitudes at most; a deviation and its square cost two more, the division
    by C, epsilon, root and reciprocal half an ulp each. A long row has eight times as many strands, hence less.
    """
    shape = Shape(tuple(int(size) for size in rng.choice(EDGE_SIZES, 5)), cols)
    values = rng.standard_normal((shape.rows, cols)) * np.exp2(rng.integers(-6, 6, (shape.rows, 1))) + rng.normal()
    x = torch.from_numpy(values).to(getattr(torch, dtype)).cuda()
    exact = x.double().cpu().numpy()[: shape.used]
    x[shape.used :] = torch.nan
    gamma = torch.ones(cols, dtype=x.dtype, device="cuda")
    mean, rstd = (torch.full((shape.rows,), -7.0, device="cuda") for _ in range(2))
    epsilon = 1e-5
    arguments: dict[str, Any] = {"prologue": native.PROLOGUES["norm"], "norm": native.NORMS[norm], "epsilon": epsilon}
    if norm == "layer":
        arguments["mean"] = mean.data_ptr()
    run_on_device(shape, x, dtype, cols, **arguments, gamma=gamma.data_ptr(), rstd=rstd.data_ptr())

    steps = cols / (8 * 32) + 12
    got_mean, got_rstd = (value.cpu().numpy()[: shape.used].astype(np.float64) for value in (mean, rstd))
    center = exact.mean(axis=1, keepdims=True) if norm == "layer" else np.zeros((shape.used, 1))
    want = 1 / np.sqrt(((exact - center) ** 2).mean(axis=1) + np.float64(np.float32(epsilon)))
    assert (np.abs(got_rstd / want - 1) <= ((steps + 4) / 2 + 2) * 2.0**-24).all()
    if norm == "layer":
        allowed = (steps + 1) * 2.0**-24 * np.abs(exact).mean(axis=1)
        assert (np.abs(got_mean - center[:, 0]) <= allowed).all()
        assert (mean[shape.used :] == -7).all()
    assert (rstd[shape.used :] == -7).all()


@pytest.mark.parametrize("stacked", [False, True])
def test_dbias_of_small_integers_is_exact(rng: np.random.Generator, stacked: bool) -> None:
    """Sums below 2^24 have one answer in any order; groups without rows have 0, tails do not count (faults.md 12)."""
    for cols in (1, 16, 130, 520):
        if stacked:
            shape = Shape((300,) * 3, cols, matrix_rows=300)
        else:
            shape = Shape((0, *(int(size) for size in rng.choice(EDGE_SIZES, 4)), 9000, 0), cols)
        x = torch.from_numpy(rng.integers(-100, 100, (shape.rows, cols)).astype(np.float32)).cuda()
        x[shape.used :] = torch.nan
        groups = len(shape.sizes)
        out = torch.full((groups, cols), torch.nan, device="cuda")
        run_on_device(shape, x, "float32", cols, dbias=out.data_ptr())
        ends = np.cumsum([0, *shape.real])
        rows = x.double().cpu().numpy()
        want = np.stack([rows[a:b].sum(axis=0) for a, b in itertools.pairwise(ends)])
        assert (out.double().cpu().numpy() == want).all()


def test_dbias_has_the_same_bits_each_time(rng: np.random.Generator) -> None:
    """A fixed order of additions: nothing depends on which CTA is first (faults.md 22, 30)."""
    shape = Shape((700, 0, 129, 5000), 264)
    x = torch.from_numpy(rng.standard_normal((shape.rows, 264)).astype(np.float32)).to(torch.bfloat16).cuda()
    results = []
    for _ in range(20):
        out = torch.full((len(shape.sizes), 264), torch.nan, device="cuda")
        run_on_device(shape, x, "bfloat16", 264, dbias=out.data_ptr())
        results.append(out.cpu().numpy().view(np.uint32))
    assert all((result == results[0]).all() for result in results)


@pytest.mark.parametrize("scaling", ["mxfp8", "row"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", ["swiglu", "geglu_tanh", "relu2", "clamped_swiglu"])
def test_gradients_of_probabilities(rng: np.random.Generator, name: str, dtype: str, scaling: str) -> None:
    """dprobs [M] is the sum of dy act(x) (* up) along rows, 0 past the last group, where rows hold NaN, with one set of
    bits, made beside the codes or the amaxes (row scaling) or, where rows are not aligned, on its own (faults.md 1, 3,
    22)."""
    gated = name in native.GATED
    kinds = {"prologue": native.PROLOGUES["activation_grad"], "activation": native.ACTIVATIONS[name]}
    for features in (32, 160, 416, 1056):
        cols = features * (1 + gated)
        shape = Shape((130, 0, 7, 300), cols)
        x, dy = (
            torch.from_numpy(rng.standard_normal((shape.rows, n)).astype(np.float32) * 2) for n in (cols, features)
        )
        x, dy = (array.to(getattr(torch, dtype)).cuda() for array in (x, dy))
        x[shape.used :], dy[shape.used :] = torch.nan, torch.nan
        results = []
        for start in (0, 1):
            apart = torch.empty(x.numel() + start, dtype=x.dtype, device="cuda")[start:].view_as(x).copy_(x)
            out = torch.full((shape.rows,), torch.nan, device="cuda")
            given = {"dy": dy.data_ptr(), "dy_stride": features, "dprobs": out.data_ptr(), **kinds}
            run_on_device(shape, apart, dtype, cols, scaling, **given)
            results.append(out.cpu().numpy())
        assert (results[0].view(np.uint32) == results[1].view(np.uint32)).all()
        wide, used = x.double().cpu()[: shape.used], slice(shape.used)
        gate, up = wide[:, :features], wide[:, features:]
        if name == "clamped_swiglu":
            gate, up = gate.clamp(max=7), (up.clamp(-7, 7).float() + 1).double()
        value = {
            "swiglu": torch.nn.functional.silu(gate),
            "geglu_tanh": torch.nn.functional.gelu(gate, approximate="tanh"),
            "relu2": gate.clamp(min=0) ** 2,
            "clamped_swiglu": gate * torch.sigmoid(1.702 * gate),
        }[name]
        terms = (value * (up if gated else 1) * dy.double().cpu()[used]).numpy()
        # 6 ulp of the activation, two products, and the additions of a row
        allowed = np.abs(terms).sum(1) * 2.0**-24 * (14 + 8 + features / 128)
        assert (np.abs(results[0][used] - terms.sum(1)) <= allowed).all()
        assert not results[0][shape.used :].any()
