"""CUDA's grouped GEMMs give the same bits each time, whatever runs beside, behind their quantizers and in graphs.

These tests skip where there is no device.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from devices import needs_device

torch = pytest.importorskip("torch", reason="torch holds the memory of the device")

from device_gemms import Prepared  # noqa: E402  torch is there
from gemm_kinds import KINDS, RAGGED, accumulation, every_kind, random_chain, tiles  # noqa: E402
from gemm_problems import Case, make_problem  # noqa: E402
from problems import CUDA  # noqa: E402

pytestmark = [
    needs_device,
    pytest.mark.usefixtures("poison", "no_errors_left"),
]


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
