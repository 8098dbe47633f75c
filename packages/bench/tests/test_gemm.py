"""`octavo bench gemm` from end to end on the reference backends, its match column, peers and advice."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from octavo.recipe_base import GEMMS
from octavo_bench.gemm.advice import advice, step_times
from octavo_bench.gemm.row import GemmRow, QuantizeTime, moved_bytes
from octavo_bench.harness.pacing import STEADY_MS, steady_times
from octavo_bench.harness.recipes import KINDS, GemmCase
from octavo_bench.harness.shapes import Shape
from octavo_bench.harness.timing import Times, affordable
from octavo_bench.peers.of_gemms import Candidate, timed
from octavo_bench.peers.peer import DENSE, Peer, beside

SHAPE = Shape("tiny", 3, 48, 80, 150)
SIZES = (67, 0, 83)
GEMM = ["bench", "gemm", "--device", "cpu", "--shape", "3,48,80,150"]
ROW_KEYS = {
    *("case", "gemm", "shape", "name", "sizes", "backend", "us", "tflops", "peer_ratios", "goals", "match"),
}


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory, run: Any, goals_file: Path) -> dict[str, Any]:
    """The file of one tiny run of the command."""
    target = tmp_path_factory.mktemp("bench") / "gemm.json"
    line = [*GEMM, "--repeats", "1", "--backend", "torch-reference", "--goals", str(goals_file)]
    result = run(*line, "--output", str(target))
    assert result.code == 0, result.out[-3000:] + result.err
    assert "No goals on this device" in result.out
    assert "the others against bf16" in result.out
    written: dict[str, Any] = json.loads(target.read_text())
    return written


def test_a_match_does_not_depend_on_the_magnitude_of_rows(seed: int) -> None:
    """Rows of an operand from 2^-6 to 2^6: right results are in bound, and an old tile among small rows is not."""
    from octavo_bench.gemm.match import Pending, Sample
    from octavo_numerics import error_bound

    rng = np.random.default_rng(seed)
    bound = error_bound(GemmCase("bf16", "fprop").recipe, 256)
    for _ in range(20):
        a = rng.normal(size=(32, 256)) * np.exp2(rng.integers(-6, 7, (32, 1)))
        a, b = a.astype(np.float32), rng.normal(size=(64, 256)).astype(np.float32)
        exact = a.astype(np.float64) @ b.T.astype(np.float64)
        right = exact.astype(ml_dtypes.bfloat16).astype(np.float32)
        assert Pending((Sample(0, right, a, b),), (bound,)).judged().startswith("in bound")
        old = right.copy()
        old[8:16, 8:16] *= np.float32(1.01)
        assert Pending((Sample(0, old, a, b),), (bound,)).judged().startswith("differs")


def test_every_gemm_is_there_and_within_its_bound(content: dict[str, Any], has_the_schema_of: Any) -> None:
    """Even and skewed sizes; each kind's three GEMMs, fast ones, accumulating wgrads."""
    assert content["schema_version"] == 1
    assert content["failures"] == []
    assert content["command"].endswith("--output gemm.json")
    assert content["match"]["differs"] == 0
    assert content["match"]["in_bound"] == len(content["rows"]) == 2 * (3 * (len(KINDS) + 3) + 5)
    for row in content["rows"]:
        assert set(row) == ROW_KEYS
        assert row["match"].startswith("in bound "), row
        assert row["us"]["median"] > 0
        assert row["backend"] == "torch-reference"
    assert all(sum(sizes) == 150 for sizes in content["groupings"].values())
    has_the_schema_of(content, "gemm-h200-2026-11-30.json")


def test_peers_are_timed_and_quantizers_beside_them(content: dict[str, Any]) -> None:
    """torch's grouped GEMM runs on a CPU; where sizes do not fit it there is a note."""
    fprop = [peer for peer in content["peers"] if (peer["peer"], peer["gemm"]) == ("grouped_mm", "fprop")]
    assert [peer["sizes"] for peer in fprop] == ["even", "skewed"]
    assert all(peer["us"] > 0 for peer in fprop)
    assert {one["kind"] for one in content["quantize"]} == set(KINDS) - {"bf16"}
    assert any("group sizes in multiples of 8" in note for note in content["notes"])


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_wrong_output_is_found(framework: str, seed: int) -> None:
    """One sampled element off by a few per cent, another group's weights, a stale row: each is outside the bound."""
    from octavo_bench.gemm.match import pending_match
    from octavo_bench.harness.engine.make import make_engine
    from octavo_bench.harness.problem import Prepared, draw, layer_plan

    engine = make_engine(framework, "cpu")
    data = draw(engine, SHAPE, seed)
    for gemm in GEMMS:
        if framework == "jax" and gemm != "wgrad":
            continue  # XLA compiles each one for seconds, and test_jax_runs_the_same_table has all three in bound
        case = GemmCase("block", gemm)
        plan = layer_plan(engine, SHAPE, case.recipe, (f"{framework}-reference",))
        prepared = Prepared(engine, data, SIZES, plan)
        result = prepared.call(case)[0]()
        pending = pending_match(prepared, case, SIZES, result, seed)
        assert pending.judged().startswith("in bound "), pending.judged()
        assert [sample.group for sample in pending.samples] == [0, 2]
        sample = pending.samples[1]
        largest = np.unravel_index(np.abs(sample.actual).argmax(), sample.actual.shape)
        for fault in (1.05, 0.0, np.nan):
            wrong = sample.actual.copy()
            wrong[largest] *= fault
            told = replace(pending, samples=(pending.samples[0], replace(sample, actual=wrong))).judged()
            assert told.startswith("differs: group 2"), (gemm, fault, told)
        swapped = replace(sample, b=sample.b[::-1].copy())
        assert replace(pending, samples=(pending.samples[0], swapped)).judged().startswith("differs")


def test_jax_runs_the_same_table(tmp_path: Path, run: Any) -> None:
    """Its reference backend, its own ragged_dot; accumulators are torch's."""
    target = tmp_path / "gemm.json"
    line = [*GEMM, "--framework", "jax", "--backend", "jax-reference", "--repeats", "1", "--kinds", "bf16,row"]
    result = run(*line, "--no-fast", "--sizes", "skewed", "--output", str(target))
    assert result.code == 0, result.out[-3000:] + result.err
    content = json.loads(target.read_text())
    assert [(row["case"], row["gemm"]) for row in content["rows"]] == [
        (kind, gemm) for kind in ("bf16", "row") for gemm in ("fprop", "dgrad", "wgrad")
    ]
    assert content["match"] == {"in_bound": 6, "differs": 0}
    assert {peer["peer"] for peer in content["peers"]} == {"ragged_dot"}
    assert all(row["peer_ratios"]["ragged_dot"] > 0 for row in content["rows"])


def test_nothing_that_serves_is_exit_code_1(run: Any) -> None:
    """The notes say why."""
    result = run(*GEMM, "--backend", "jax-reference", "--kinds", "block", "--ops", "fprop")
    assert result.code == 1
    assert "serves jax, the framework is torch" in result.out
    assert "no backend serves any of these GEMMs" in result.err


class _Clock:
    """An engine that only calls."""

    device = "cpu"

    def times(self, calls: Any, repeats: int) -> Times:
        calls[0]()
        return Times(100.0, 90.0, 110.0)


class _Warm(_Clock):
    """A GPU that counts what runs before it is timed."""

    device = "cuda"

    def __init__(self, microseconds: float) -> None:
        self.microseconds, self.before = microseconds, 0.0

    def batch(self, calls: Any, count: int) -> float:
        self.before += count * self.microseconds
        return self.microseconds


@pytest.mark.parametrize("microseconds", [40.0, 7000.0, 500_000.0])
def test_a_gpu_has_run_for_a_while_before_it_is_timed(microseconds: float) -> None:
    """An idle one would run above the clocks of a long run, and flatter whoever is first."""
    engine = _Warm(microseconds)
    assert steady_times(engine, [lambda: None], 3).median == 100.0  # type: ignore[arg-type]
    assert 1e3 * STEADY_MS <= engine.before <= 1e3 * STEADY_MS + 5 * microseconds


def test_an_absent_peer_is_a_note() -> None:
    """Whatever it raises when it is made or called."""

    def absent(operands: Any) -> Any:
        raise AttributeError("module 'torch' has no attribute '_grouped_mm'")

    def refuses(operands: Any) -> Any:
        return lambda: 1 / 0

    plan = [
        Candidate("a", "even", "fprop", absent),
        Candidate("b", "even", "fprop", refuses),
        Candidate("grouped_mm", "even", "fprop", lambda operands: lambda: None),
    ]
    data: Any = type("Drawn", (), {"shape": SHAPE, "sets": ({},)})
    found = timed(_Clock(), data, plan, 3)  # type: ignore[arg-type]
    assert [peer.note for peer in found] == [
        "a fprop: AttributeError: module 'torch' has no attribute '_grouped_mm'",
        "b fprop: ZeroDivisionError: division by zero",
        "",
    ]
    assert [peer.tflops for peer in found] == [None, None, SHAPE.tflops(100.0)]
    dense = Peer("dense bf16", SHAPE, DENSE, DENSE, Times(50.0, 50.0, 50.0))
    assert list(beside([*found, dense], GemmCase("bf16", "fprop"), "even")) == ["grouped_mm", "dense bf16"]
    assert beside([*found, dense], GemmCase("bf16", "dgrad"), "skewed") == {"dense bf16": dense}


def _measured(quantize: float, **times: float) -> list[GemmRow | QuantizeTime]:
    shape = Shape("your shape", 8, 1024, 4096, 2048)
    rows = [
        GemmRow(GemmCase(kind, gemm), shape, "even", "torch-native", Times(us, us, us), "in bound 0.5", {})
        for kind, us in times.items()
        for gemm in GEMMS
    ]
    spent = Times(quantize, quantize, quantize)
    return [*rows, *(QuantizeTime(kind, shape, "even", spent) for kind in times if kind != "bf16")]


def test_advice_is_made_of_the_measured_rows() -> None:
    """Three GEMMs and the quantizers against three of bf16."""
    measured = _measured(140.0, bf16=533.0, block=286.0, mxfp8=600.0)
    assert step_times(measured)["block"].total == pytest.approx(998.0, rel=1e-12)
    first, others, weights = advice(measured)
    assert "a step in block is 1.60x faster than in bf16 (0.998 against 1.6 ms); quantization is 14% of it" in first
    assert others.endswith("the others against bf16: mxfp8 0.82x.")
    assert weights.endswith("with several microbatches a step, quantize them once and reuse them.")
    (slower,) = advice(_measured(10.0, bf16=100.0, nvfp4=150.0))
    assert "bf16 is the fastest here; a step in nvfp4, the next, takes 1.53x its time" in slower
    (same,) = advice(_measured(9.0, bf16=100.0, block=96.0))
    assert "takes as long as in bf16" in same
    assert list(advice(_measured(1.0, block=96.0))) == []


def test_goals_see_the_other_rows_of_a_run(judged: Any, described: Any) -> None:
    """A skewed row its even one, a stored wgrad its limit, every row its peers."""
    plain, quantized = (
        [row for row in _measured(10.0, **{kind: us}) if isinstance(row, GemmRow)]
        for kind, us in (("bf16", 100.0), ("row", 50.0))
    )
    shape = plain[0].shape
    peers = {"grouped_mm": shape.tflops(110.0), "scaled_grouped_mm exact": shape.tflops(45.0)}
    even = [replace(row, peers=peers) for row in (*plain, *quantized)]
    even[-1] = replace(even[-1], limit_us=45.0)
    accumulating = replace(even[-1], case=GemmCase("row", "wgrad", accumulate=True), limit_us=None)
    skewed = replace(even[0], sizes="skewed", times=Times(120.0, 120.0, 120.0))
    rows = [*even, accumulating, skewed]
    told = {
        (row.case.label, row.case.gemm, row.sizes): described(judged("gemm", row, rows, gpu="some GPU")) for row in rows
    }
    assert told["bf16", "fprop", "even"] == ["1.05 of grouped_mm: pass"]
    assert told["bf16", "fprop", "skewed"] == ["1.05 of grouped_mm: MISS", "0.94 of even: MISS"]
    assert told["row", "dgrad", "even"] == ["1 of scaled_grouped_mm exact: MISS"]
    assert told["row", "wgrad", "even"] == [
        "1 of scaled_grouped_mm exact: MISS",
        "0.8 of memory's or tensor cores' limit: pass",
    ]
    assert told["row += fp32", "wgrad", "even"] == []  # no dense peer, no limit


def test_bytes_that_have_to_move_are_counted_once() -> None:
    """Both operands and the result, by hand: what a limit of memory and the roofline of the docs are made of."""
    shape = Shape("by hand", 2, 16, 32, 64)  # x 1024 values, w 1024, y 2048
    counted = {
        GemmCase("bf16", "fprop"): 2 * 1024 + 2 * 1024 + 2 * 2048,
        GemmCase("block", "fprop"): 1024 + 1024 + 2 * 2048,
        GemmCase("block", "dgrad"): 2048 + 1024 + 2 * 1024,
        GemmCase("row", "wgrad"): 2048 + 1024 + 2 * 1024,
        GemmCase("bf16", "wgrad", accumulate=True): 2 * 2048 + 2 * 1024 + 8 * 1024,
        GemmCase("nvfp4", "dgrad"): 1024 + 512 + 2 * 1024,
    }
    assert {case: moved_bytes(case, shape) for case in counted} == counted


def test_slow_calls_are_repeated_less() -> None:
    """A peer of 80 ms is called three times, a kernel as often as was asked."""
    assert affordable(20, 300.0, 80.0) == 20
    assert affordable(20, 10_000.0, 80.0) == 8
    assert affordable(20, 80_000.0, 80.0) == 3
