"""The CUDA quantizers inside of graphs: replayed with other sizes and weights, compiled, and without a wait."""

from __future__ import annotations

import native_calls as native
import numpy as np
import pytest
import torch
from cuda_device import MARKS, SPLITS, no_sync
from cuda_quantizers import LAYOUTS, K, M, assert_valid, every, given, launches, raw, rows
from torch import Tensor

import octavo_torch
from octavo_conformance.cards.variants import RAGGED, STACKED

pytestmark = [*MARKS, pytest.mark.usefixtures("no_flag_is_left")]


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
