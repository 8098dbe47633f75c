"""The CUDA kernels through torch: captured graphs, streams, sizes past 2^31, races, bad sizes; bits of the CPU.

Skipped where torch sees no Hopper device or octavo-native was built without CUDA kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import native_calls as native
import numpy as np
import pytest
import torch
from cuda_device import MARKS, SPLITS, no_sync
from torch import Tensor

import octavo_numerics
import octavo_torch
from octavo import QuantizerSpec
from octavo_conformance.cards.variants import RAGGED, STACKED
from octavo_torch import GroupedTensor, check_errors
from octavo_torch.arrays.grouped_tensor import PLANES
from octavo_torch.bridge import BRIDGE
from octavo_torch.compiler.status import DeviceSizesError

pytestmark = MARKS

GB = 1 << 30
G, M, K = 6, 700, 272
LAYOUTS = (("plain", "plain"), ("rows", "panels"))
Arguments = dict[str, Any]


@pytest.fixture(autouse=True)
def no_flag_is_left() -> Iterator[None]:
    """Sizes that fit set no flag."""
    check_errors()
    yield
    check_errors()


def given(spec: QuantizerSpec, device: str = "cuda", groups: int = G) -> Arguments:
    arguments: Arguments = {}
    if spec.stochastic:
        arguments |= {"seed": torch.tensor(1234567890123456789, device=device), "group_offset": 3}
    if spec.scaling == "delayed":
        arguments["scale"] = torch.exp2(torch.arange(groups, dtype=torch.float32) - 2).to(device)
    return arguments


def every(value: native.Quantized | GroupedTensor) -> dict[str, Tensor]:
    """Every tensor of a result by name."""
    codes = value.codes if isinstance(value, native.Quantized) else value
    found = {name: getattr(codes, name) for name in (*PLANES, "group_sizes")}
    if isinstance(value, native.Quantized):
        found |= {name: item for name, item in vars(value).items() if name != "codes"}
    return {name: item for name, item in found.items() if item is not None}


def raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def assert_valid(a: native.Quantized, b: native.Quantized, used: int, what: object = "") -> None:
    """What is defined is the same, on whatever device: codes and scales of used rows, extras."""
    for direction in a.codes.spec.quantizer.directions:
        plain = [native.convert(value.codes, ("plain", "plain")) for value in (a, b)]
        ours, theirs = (octavo_torch.dequantize(q, direction).cpu() for q in plain)
        assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32)), f"{what}: {direction} values"
    assert_planes(a.codes, b.codes, what)
    for name in ("amax", "dbias"):
        ours, theirs = getattr(a, name), getattr(b, name)
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert torch.equal(raw(ours.cpu()), raw(theirs.cpu())), f"{what}: {name}"
    for name in ("dequantized", "activated", "mean", "rstd"):
        ours, theirs = getattr(a, name), getattr(b, name)
        if ours is not None and theirs is not None:
            flat = [value.reshape(-1, value.shape[-1] if value.dim() > 1 else 1)[:used] for value in (ours, theirs)]
            assert torch.equal(raw(flat[0].cpu()), raw(flat[1].cpu())), f"{what}: {name}"


def assert_planes(a: GroupedTensor, b: GroupedTensor, what: object = "") -> None:
    """Valid codes and scales, byte for byte."""
    arrays = []
    for value in (a, b):
        plain = native.convert(value, ("plain", "plain"))
        sizes = None if plain.group_sizes is None else plain.group_sizes.cpu().numpy()
        planes = {name: getattr(plain, name) for name in PLANES}
        made = {name: None if plane is None else BRIDGE.to_numpy(plane) for name, plane in planes.items()}
        arrays.append(octavo_numerics.valid(octavo_numerics.QuantizedArray(plain.spec, sizes, **made)))
    assert arrays[0].keys() == arrays[1].keys()
    for name, plane in arrays[0].items():
        assert plane.tobytes() == arrays[1][name].tobytes(), f"{what}: {name}"


def rows(dtype: torch.dtype = torch.bfloat16, sizes: list[int] | None = None, columns: int = K) -> Tensor:
    x = torch.randn(M, columns, dtype=torch.float32, device="cuda").to(dtype)
    if sizes is not None:
        x[sum(sizes) :] = torch.nan
    return x


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


def launches(name: str, layouts: tuple[str, str]) -> dict[str, Callable[[Tensor, Tensor, Tensor], native.Quantized]]:
    """Calls of (x [M, K], dy [M, K / 2], sizes): plain and fused."""
    spec = RAGGED[name]
    options: Arguments = {"layouts": layouts, "amax": True, "dequantized": True, **given(spec)}
    gamma = torch.randn(K, device="cuda").bfloat16()
    probs = torch.rand(M, device="cuda")
    return {
        "quantize": lambda x, dy, s: native.quantize(x, spec, s, **options),
        "act": lambda x, dy, s: native.act_quantize(x, spec, s, probs=probs, activated=True, **options),
        "dact": lambda x, dy, s: native.dact_quantize(dy, x, spec, s, probs=probs, dbias=True, **options),
        "norm": lambda x, dy, s: native.norm_quantize(x, gamma, gamma, spec, s, norm="layer", **options),
    }


@pytest.mark.parametrize("layouts", LAYOUTS, ids="-".join)
@pytest.mark.parametrize("name", RAGGED)
def test_captured_and_replayed_with_other_sizes(name: str, layouts: tuple[str, str], rng: np.random.Generator) -> None:
    """A captured launch equals eager bit for bit after sizes and inputs change; nothing waits (faults 33, 35, 36)."""
    for what, call in launches(name, layouts).items():
        x, dy = rows(), rows(columns=K // 2)
        sizes = torch.tensor(SPLITS[0], device="cuda")
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call(x, dy, sizes)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with no_sync(), torch.cuda.graph(graph):
            captured = call(x, dy, sizes)
        for split in SPLITS:
            sizes.copy_(torch.tensor(split))
            x.copy_(rows(sizes=split))
            dy.copy_(rows(sizes=split, columns=K // 2))
            graph.replay()
            with no_sync():
                eager = call(x, dy, sizes)
            assert_valid(captured, eager, sum(split), f"{what}, sizes {split}")


@pytest.mark.parametrize("name", STACKED)
def test_weights_in_a_graph(name: str, rng: np.random.Generator) -> None:
    """Weights quantized again inside a graph, or left as they are where the flag on the device says so (fault 37)."""
    spec = STACKED[name]
    options = {**given(spec, groups=3), "amax": not spec.mxfp4}  # what is rounded first has planes alone
    w = torch.randn(3, 144, K, device="cuda").bfloat16()
    for layouts in LAYOUTS:
        out = native.quantize(w, spec, layouts=layouts, **options)
        flag = torch.zeros(1, dtype=torch.int32, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            native.quantize(w, spec, layouts=layouts, out=out, unchanged=flag, **options)
        for unchanged in (0, 1, 1, 0):
            before = {name: tensor.clone() for name, tensor in every(out).items()}
            w.normal_()
            flag.fill_(unchanged)
            graph.replay()
            if unchanged:
                for plane, tensor in every(out).items():
                    assert torch.equal(raw(tensor), raw(before[plane])), plane
            else:
                fresh = native.quantize(w, spec, layouts=layouts, **options)
                assert_valid(out, fresh, 3 * 144)


@pytest.mark.parametrize("name", RAGGED)
def test_nothing_waits(name: str, rng: np.random.Generator) -> None:
    """Device sizes, the front end included: no synchronization in any call; seeds as integers, too."""
    spec, x, sizes = RAGGED[name], rows(), torch.tensor(SPLITS[0], device="cuda", dtype=torch.int32)
    options = given(spec)
    for seed in (None, 7) if spec.stochastic else (None,):
        if seed is not None:
            options["seed"] = seed
        octavo_torch.quantize(x, spec, sizes, backend="torch-native", **options)
        with no_sync():
            q = octavo_torch.quantize(x, spec, sizes, backend="torch-native", **options)
            native.plan(sizes, M)
            native.dequantize(q, "rowwise")
            native.dequantize(q, "columnwise")
            native.convert(q, ("rows", "panels"))
            native.group_amax(x, sizes)


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


@pytest.mark.parametrize("name", ["current.e4m3", "row.e4m3.pow2", "block.e4m3.pow2", "mxfp8.e4m3", "nvfp4.hadamard"])
@pytest.mark.parametrize("layouts", LAYOUTS, ids="-".join)
def test_more_than_two_to_the_31_elements(name: str, layouts: tuple[str, str], rng: np.random.Generator) -> None:
    """The last groups of an operand of more than 2^31 elements are those of a call of their own (faults 26 to 29)."""
    columns = 7168
    total = (1 << 31) // columns + 1000
    if torch.cuda.get_device_properties(0).total_memory < 40 * GB:
        pytest.skip("needs 40 GB of device memory")
    spec = RAGGED[name]
    last = 700
    x = torch.empty(total, columns, dtype=torch.bfloat16, device="cuda")
    for start in range(0, total, 1 << 16):
        x[start : start + (1 << 16)].normal_()
    sizes = torch.tensor([5, total - last - 105, 0, last, 100 - 37], device="cuda")
    big = native.quantize(x, spec, sizes, layouts=layouts, amax=True).codes
    start = int(sizes[:3].sum())
    small = native.quantize(x[start:], spec, sizes[3:], layouts=layouts, group_offset=3).codes
    used = int(sizes[3:].sum())
    for direction in ("rowwise", "columnwise"):
        values = native.dequantize(big, direction, dtype=torch.bfloat16)
        expected = native.dequantize(small, direction, dtype=torch.bfloat16)
        if spec.hadamard and direction == "columnwise":
            first = int(((sizes[:3] + 15) // 16 * 16).sum())
            count = int(((sizes[3:] + 15) // 16 * 16).sum())
        else:
            first, count = start, used
        assert torch.equal(raw(values[first : first + count]), raw(expected[:count])), direction
        del values, expected
    del big, small, x
    torch.cuda.empty_cache()


@pytest.mark.parametrize("name", ["current.e4m3", "block.e4m3.square", "mxfp8.e4m3", "nvfp4.square"])
def test_matrices_of_more_than_two_to_the_31_elements(name: str, rng: np.random.Generator) -> None:
    """The same for weights: the last matrix alone has the same codes (faults 26 to 29)."""
    groups, n, k = 80, 4096, 6656
    assert groups * n * k > 1 << 31
    w = torch.empty(groups, n, k, dtype=torch.bfloat16, device="cuda")
    for matrix in w:
        matrix.normal_()
    spec = STACKED[name]
    big = native.quantize(w, spec, layouts=("rows", "panels")).codes
    small = native.quantize(w[-1:], spec, layouts=("rows", "panels"), group_offset=groups - 1).codes
    for direction in ("rowwise", "columnwise"):
        values = native.dequantize(big, direction, dtype=torch.bfloat16)[-1:]
        assert torch.equal(raw(values), raw(native.dequantize(small, direction, dtype=torch.bfloat16)))
        del values
    del big, small, w
    torch.cuda.empty_cache()


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


@pytest.mark.parametrize("name", ["mxfp8.e4m3", "nvfp4.stochastic.hadamard"])
def test_reduce_overhead(name: str, rng: np.random.Generator) -> None:
    """torch.compile(mode="reduce-overhead") captures the operators; other sizes, the bits of eager.

    Dynamo of torch 2.11 takes no dequantize of a plane that the same graph has made, so there the codes are compared.
    """
    dequantizes = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 12)
    spec = RAGGED[name]
    options = given(spec)

    def run(x: Tensor, sizes: Tensor) -> tuple[Tensor | None, ...]:
        q = octavo_torch.quantize(x * 2, spec, sizes, **options)
        if not dequantizes:
            return q.rowwise, q.columnwise
        return octavo_torch.dequantize(q), octavo_torch.dequantize(q, "columnwise")

    compiled = torch.compile(run, fullgraph=True, mode="reduce-overhead")
    for split in SPLITS:
        x, sizes = rows(sizes=split), torch.tensor(split, device="cuda")
        for ours, theirs in zip(compiled(x, sizes), run(x, sizes), strict=True):
            assert ours is not None
            assert theirs is not None
            defined = len(ours) if dequantizes else sum(split)  # codes of rows past the sum are anything
            assert torch.equal(raw(ours.clone())[:defined], raw(theirs)[:defined]), split


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one device")
def test_the_second_device(rng: np.random.Generator) -> None:
    """A tensor of another device than the current one is served there, on its own stream."""
    spec, x = RAGGED["mxfp8.e4m3"], rows()
    expected = native.quantize(x, spec, torch.tensor(SPLITS[0], device="cuda:0"))
    made = native.quantize(x.to("cuda:1"), spec, torch.tensor(SPLITS[0], device="cuda:1"))
    assert made.codes.rowwise.device == torch.device("cuda:1")
    assert torch.cuda.current_device() == 0
    assert_valid(made, expected, sum(SPLITS[0]))
