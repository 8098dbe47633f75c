"""`octavo bench quantize` from end to end, on the CPU; and the GPU's path with its clocks replaced."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ABSENT = [name for name in ("octavo_native", "octavo_torch_native") if importlib.util.find_spec(name) is None]

pytestmark = pytest.mark.skipif(
    bool(ABSENT), reason=f"{', '.join(ABSENT)} not installed: the extra octavo[torch-native] brings the kernels"
)

ROW_KEYS = {
    *("case", "shape", "grouping", "bytes_read", "bytes_written", "bytes_per_element", "us", "threads"),
    *("input_copies", "tb_per_s", "input_gb_per_s", "copy_tb_per_s", "predicted_us", "ratio", "goal", "passed"),
    *("all_cores_us", "host_us", "peer_us", "peer_ratio", "peer_codes_equal", "match", "notes"),
}


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory, run: Any, goals_file: Path) -> dict[str, Any]:
    """The file of one tiny run of the command."""
    target = tmp_path_factory.mktemp("bench") / "quantize.json"
    line = ["bench", "quantize", "--device", "cpu", "--shapes", "256x256", "--groups", "2", "--ragged-groups", "5"]
    result = run(*line, "--repeats", "2", "--goals", str(goals_file), "--output", str(target))
    assert result.code == 0, result.out[-3000:] + result.err
    assert "Goals reached:" in result.out
    written: dict[str, Any] = json.loads(target.read_text())
    return written


def test_every_case_is_there_and_equals_the_definition(content: dict[str, Any]) -> None:
    """Two tables; weights once; each quantizer bit for bit."""
    from octavo_bench.quantize.case import CASES

    assert content["schema_version"] == 1
    assert content["command"].endswith("--output quantize.json")
    assert content["failures"] == []
    labels = [case.label for case in CASES]
    assert [row["case"] for row in content["rows"] if row["grouping"] == "2 even"] == labels
    ragged = [case.label for case in CASES if case.kind != "weights"]
    assert [row["case"] for row in content["rows"] if row["grouping"] == "5 ragged"] == ragged
    timed_alone = {case.label for case in CASES if case.kind in ("plan", "dequantize")}
    assert {row["match"] for row in content["rows"] if row["case"] not in timed_alone} == {"equal"}


def test_rows_have_their_fields_and_sensible_numbers(content: dict[str, Any], has_the_schema_of: Any) -> None:
    """Times are positive, a goal only for 1x128 rows, and sizes fill the rows."""
    for row in content["rows"]:
        assert set(row) == ROW_KEYS
        assert row["us"]["low"] <= row["us"]["median"] <= row["us"]["high"]
        assert row["us"]["median"] > 0
        assert row["ratio"] is None
        assert (row["goal"] is not None) == (row["case"] == "block row")
    for name, sizes in content["groupings"].items():
        assert sum(sizes) == 256, name
    assert content["device"] == "cpu"
    assert content["machine"]["cores"] >= 1
    assert content["versions"]["torch"]
    for published in ("quantize-h200-2026-11-30.json", "quantize-cpu-2026-11-21.json"):
        has_the_schema_of(content, published)


def test_the_bound_plan_of_the_plugin_is_timed(content: dict[str, Any]) -> None:
    """The whole host path of every quantizer without a prologue."""
    for row in content["rows"]:
        if row["case"].startswith(("swiglu", "plan")) or "panels" in row["case"]:
            assert row["host_us"] is None
        else:
            assert row["host_us"]["median"] > 0, row["notes"]


def test_a_wrong_bit_is_found(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Codes, scales and second levels of both directions, each with one byte changed after the call."""
    from octavo_bench.quantize import match
    from octavo_bench.quantize.case import Case

    honest = match.quantize_problem
    case = Case("quantize", "nvfp4", "both")
    assert match.check_match(case, "bfloat16", "cpu", seed) == "equal"
    for direction in ("rowwise", "columnwise"):
        for part in ("codes", "scales", "factor"):

            def faulty(*given: Any, at: str = direction, array: str = part, **named: Any) -> Any:
                problem = honest(*given, **named)

                def call() -> None:
                    problem.call()
                    getattr(problem.planes[at], array)[3] ^= 1  # type: ignore[index]

                return SimpleNamespace(call=call, planes=problem.planes, activated=None)

            monkeypatch.setattr(match, "quantize_problem", faulty)
            told = match.check_match(case, "bfloat16", "cpu", seed)
            named = "second-level factors" if part == "factor" else part
            assert told.startswith("differs: 1 of"), told
            assert told.endswith(f"{direction} {named}")


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_dtypes_match_too(dtype: Any, seed: int) -> None:
    """What `--dtype` chooses."""
    from octavo_bench.quantize import match
    from octavo_bench.quantize.case import CASES

    for case in (case for case in CASES if case.outputs == "both"):
        assert match.check_match(case, dtype, "cpu", seed) == "equal", case.label


def test_the_gpus_path_with_its_clocks_replaced(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Copy rate, rotation of inputs, peers, ratios: everything but the device."""
    from octavo_bench.harness.shapes import even
    from octavo_bench.harness.timing import Times
    from octavo_bench.peers import compile as peers
    from octavo_bench.quantize import measure
    from octavo_bench.quantize.case import CASES
    from octavo_bench.quantize.problem import Setting

    called: list[int] = []

    def times(calls: Sequence[Callable[[], Any]], repeats: int, warm_ms: float = 0.0) -> Times:
        for call in calls:
            call()
        called.append(len(calls))
        return Times(10.0, 9.0, 11.0)

    monkeypatch.setattr(measure, "cuda_times", times)
    monkeypatch.setattr(measure, "cuda_graph_times", lambda call, repeats: times([call], repeats))
    monkeypatch.setattr(measure.torch.cuda, "get_device_properties", lambda _: SimpleNamespace(L2_cache_size=200_000))
    monkeypatch.setattr(peers.torch, "compile", lambda function, dynamic: function)
    grouping = even(512, 4)
    setting = Setting(512, 256, grouping.sizes, "bfloat16", "cpu", seed=seed)
    assert measure.copy_rate(setting, 5) == pytest.approx(2 * 512 * 256 * 2 / 10.0 / 1e6, rel=1e-12)
    assert called == [3]  # 262 144 bytes an input, three caches of 200 000
    compared = 0
    for case in CASES:
        if case.kind == "weights":
            continue
        facts = measure.measured_on_cuda(case, setting, grouping, 5, peers=True)
        assert facts["times"].median == 10.0
        if "peer" in facts:
            compared += 1
            # the CPU's activation and torch's may round differently; everything else is the definition's bits
            assert facts["peer_codes_equal"] >= (0.99 if case.swiglu else 1.0), case.label
    assert compared == 5
