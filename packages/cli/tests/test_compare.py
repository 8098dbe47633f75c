"""octavo compare and octavo advise: what differs, what is within the spread, and where a time comes from."""

from __future__ import annotations

import copy
import json
import math
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import octavo
from octavo_cli.advice import CHIPS, Shape, advice_on, best, bytes_of, roofline_us
from octavo_numerics import quantize

TRAINED: dict[str, Any] = {
    "framework": "torch",
    "config": {"steps": 10, "width": 64},
    "recipes": {"bf16": {"fingerprint": "a"}, "mxfp8": {"fingerprint": "b"}},
    "held_out_loss": {"bf16": 2.0, "mxfp8": 2.1},
    "gaps": [{"recipe": "mxfp8", "percent": 5.0, "spread_percent": 0.3}],
    "weights": {"mxfp8": {"fc1": {"sqnr_db": 31.5}, "fc2": {"sqnr_db": 30.5}}},
    "runs": [],
}


def timed(*rows: tuple[str, float, float, float]) -> dict[str, Any]:
    """A result of octavo bench."""
    return {
        "date": "2026-01-02",
        "machine": {"gpu": "NVIDIA H200"},
        "rows": [
            {"case": case, "gemm": gemm, "shape": [2, 64, 32, 128], "sizes": "even",
             "us": {"median": median, "low": low, "high": high}}
            for case, median, low, high in rows
            for gemm in ("fprop", "dgrad", "wgrad")
        ],
    }  # fmt: skip


def written(path: Path, content: Any) -> str:
    path.write_text(json.dumps(content))
    return str(path)


def test_two_trainings(tmp_path: Path, run: Any) -> None:
    """Folders or files; settings that differ, losses, gaps with their spread, and recipes that one of them lacks."""
    other = copy.deepcopy(TRAINED)
    other["config"]["steps"] = 20
    other["held_out_loss"] = {"bf16": 1.5, "nvfp4": 1.8}
    (tmp_path / "one").mkdir()
    written(tmp_path / "one" / "curves.json", TRAINED)
    paths = [str(tmp_path / "one"), written(tmp_path / "two.json", other)]
    result = run("compare", *paths, "--json")
    assert result.code == 0, result.err
    assert result.json["settings"] == [{"setting": "config.steps", "first": "10", "second": "20"}]
    rows = {row["recipe"]: row for row in result.json["rows"]}
    assert list(rows) == ["bf16", "mxfp8", "nvfp4"]
    assert rows["bf16"]["change_percent"] == pytest.approx(-25)
    assert rows["mxfp8"]["gap_percent"] == [5.0, 5.0]
    assert rows["mxfp8"]["worst_sqnr_db"] == [30.5, 30.5]
    assert rows["nvfp4"]["change_percent"] is None
    assert "-25.00 %" in run("compare", *paths).out


def test_two_benchmarks(tmp_path: Path, run: Any) -> None:
    """A row is slower or faster only where the ranges are apart; a file without ranges is not judged."""
    one = timed(("bf16", 100, 95, 105), ("mxfp8", 50, 49, 51), ("row", 10, 10, 10), ("gone", 1, 1, 2))
    two = timed(("bf16", 104, 99, 110), ("mxfp8", 60, 58, 62), ("row", 20, 20, 20))
    result = run("compare", written(tmp_path / "1.json", one), written(tmp_path / "2.json", two), "--json")
    verdicts = {tuple(row["what"][1:3]): row["verdict"] for row in result.json["rows"]}
    assert verdicts["bf16", "fprop"] == "within the spread"
    assert verdicts["mxfp8", "wgrad"] == "slower"
    assert verdicts["row", "dgrad"] == "no spread known"
    assert verdicts["gone", "fprop"] == "in one file alone"
    assert "3 slower" in run("compare", str(tmp_path / "1.json"), str(tmp_path / "2.json")).out


def test_rows_that_differ_in_how_they_ran_are_apart(tmp_path: Path, run: Any) -> None:
    """By the route, the payload, the devices or the policy; rows that say the same of themselves are numbered. Each
    of them took the place of the one before it, and the second file's other order made it twice as fast."""
    ways: list[dict[str, Any]] = [
        {"route": "collective", "payload": False}, {"route": "peer", "payload": False},
        {"route": "peer", "payload": True}, {"devices": 4}, {"policy": "remat"}, {"policy": "save_all"}, {}, {},
    ]  # fmt: skip
    rows = [
        {
            "kind": "bf16",
            "shape": [8, 64, 32, 128],
            **way,
            "us": {"median": 10 * at, "low": 10 * at, "high": 10 * at + 1},
        }
        for at, way in enumerate(ways, start=1)
    ]
    one = {"command": "octavo bench ep", "rows": rows}
    two = {"command": "octavo bench ep", "rows": [*reversed(rows[:-2]), *rows[-2:]]}
    result = run("compare", written(tmp_path / "1.json", one), written(tmp_path / "2.json", two), "--json")
    assert [row["ratio"] for row in result.json["rows"]] == [1] * len(rows)
    assert len({tuple(row["what"]) for row in result.json["rows"]}) == len(rows)


def test_what_a_plan_said_is_no_part_of_a_row_s_name(tmp_path: Path, run: Any) -> None:
    """A sentence about what ran fused differs between versions that are compared, and fills a screen."""
    files = []
    for words in ("activation fused by one", "activation in one pass by another, not quantized"):
        content = timed(("bf16", 10.0, 9.0, 11.0))
        content["rows"] = [{**content["rows"][0], "way": "fused", "fused": words}]
        files.append(written(tmp_path / f"{len(files)}.json", content))
    (row,) = run("compare", *files, "--json").json["rows"]
    assert row["ratio"] == 1
    assert not any("activation" in part for part in row["what"])


def test_tiles_are_compared_one_by_one(tmp_path: Path, run: Any) -> None:
    """A row of `octavo bench tiles` has the times of several, and none of its own."""
    paths = []
    for name, factor in (("a", 1), ("b", 2)):
        content = timed(("bf16", 0, 0, 0))
        for row in content["rows"]:
            del row["us"]
            row["tiles"] = [
                {
                    "name": tile,
                    "predicted_us": 5,
                    "us": {"median": us * factor, "low": us * factor, "high": 3 + us * factor},
                }
                for tile, us in (("128x256", 100), ("64x256", 200))
            ]
        paths.append(written(tmp_path / f"{name}.json", content))
    result = run("compare", *paths, "--json")
    assert result.code == 0, result.err
    told = [(row["what"][2:], row["ratio"], row["verdict"]) for row in result.json["rows"]]
    assert told == [
        ([gemm, "2,64,32,128", "even", tile], 2.0, "slower")
        for gemm in ("fprop", "dgrad", "wgrad")
        for tile in ("128x256", "64x256")
    ]


def test_benchmarks_without_a_row_in_common(tmp_path: Path, run: Any) -> None:
    """They are of two commands, or of other shapes: one line says so, where a table of no rows said nothing."""
    step = {"command": "octavo bench step --quick", **timed(("moe", 9, 8, 10))}
    gemm = {"command": "octavo bench gemm", **timed(("bf16", 100, 95, 105))}
    paths = [written(tmp_path / "s.json", step), written(tmp_path / "g.json", gemm)]
    for more in ([], ["--json"]):
        result = run("compare", *paths, *more)
        assert result.code == 2
    told = run("compare", *paths).err
    assert "s.json is a result of octavo bench step and " in told
    assert told.strip().endswith("g.json of octavo bench gemm; compare two of one command")
    step["command"] = gemm["command"]
    same = run("compare", written(tmp_path / "s.json", step), paths[1])
    assert same.code == 2
    assert "have no row in common: the first row of one is 'moe fprop 2,64,32,128 even'" in same.err
    assert len(same.err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("{", "not valid JSON"),
        ("[1]", "holds a list"),
        ("{}", "neither runs"),
        (None, "No such file"),
        ('{"schema_version": 2}', "has schema_version 2, and this octavo reads 1; upgrade octavo, or make it again"),
        ('{"runs": [], "held_out_loss": {}, "gaps": null}', "neither runs"),
        ('{"runs": [], "held_out_loss": {}, "weights": 5}', "neither runs"),
    ],
)
def test_what_is_no_result_is_one_line(content: str | None, named: str, tmp_path: Path, run: Any) -> None:
    """Exit code 2 with the path; a training and a benchmark are not compared."""
    path = tmp_path / "x.json"
    if content is not None:
        path.write_text(content)
    good = written(tmp_path / "good.json", TRAINED)
    result = run("compare", good, str(path))
    assert result.code == 2
    assert named in result.err
    assert "x.json" in result.err
    assert len(result.err.strip().splitlines()) == 1
    mixed = run("compare", good, written(tmp_path / "b.json", timed(("bf16", 1, 1, 2))))
    assert mixed.code == 2
    assert "compare two of one kind" in mixed.err


@pytest.mark.parametrize("name", ["fp8-current", "fp8-row", "fp8-block", "mxfp8", "mxfp8-folded", "nvfp4"])
def test_bytes_are_those_of_what_is_stored(name: str) -> None:
    """Planes of x and of the weights as the definition makes them; shared codes count once."""
    recipe, shape = octavo.recipe(name), Shape(2, 96, 64, 200)
    total = 0
    for operand, value in (("x", np.ones((200, 96), np.float32)), ("w", np.ones((2, 64, 96), np.float32))):
        spec = recipe.quantizer(operand)  # type: ignore[arg-type]
        assert spec is not None
        q = quantize(value, spec, [100, 100] if operand == "x" else None)
        for way in ("rowwise",) if spec.shares_codes else spec.directions:
            total += getattr(q, way).nbytes + getattr(q, f"{way}_scale").nbytes
    assert bytes_of(recipe, shape) == total


def test_a_roofline_is_the_larger_of_sums_and_bytes() -> None:
    """Large products are bound by the chip's rate, for FP8 twice bf16's; a Hopper multiplies MXFP8 at bf16's."""
    chip, shape = CHIPS["h200"], Shape(1, 8192, 8192, 65536)
    names = ("bf16", "fp8-block", "mxfp8", "mxfp8-folded")
    bf16, block, mx, folded = (roofline_us(octavo.recipe(name), shape, chip) for name in names)
    assert bf16 == pytest.approx(6 * 65536 * 8192**2 / 989.4e12 * 1e6, rel=1e-6)
    assert block == pytest.approx(bf16 / 2, rel=1e-3)
    assert mx == pytest.approx(bf16)
    assert folded == block
    few = Shape(64, 4096, 4096, 64)
    assert roofline_us(octavo.recipe("bf16"), few, chip) > 3 * 2 * 64 * 4096**2 / 4.8e12 * 1e6


def test_advice_names_where_its_times_come_from(tmp_path: Path, run: Any) -> None:
    """Measured where a file of this chip has the shape, a roofline else; the fastest that keeps the SQNR is advised."""
    results = written(tmp_path / "r.json", timed(("bf16", 100, 99, 101), ("block", 40, 39, 41)))
    arguments = ["advise", "--shape", "2,64,32,128", "--recipes", "bf16,fp8-block,nvfp4", "--json"]
    answer = run(*arguments, "--results", results).json
    rows = {row["recipe"]: row for row in answer["recipes"]}
    assert (rows["bf16"]["us"], rows["bf16"]["time"], rows["bf16"]["sqnr_db"]) == (300.0, "measured", None)
    assert (rows["fp8-block"]["us"], rows["fp8-block"]["time"]) == (120.0, "measured")
    assert rows["nvfp4"]["time"] == "roofline"
    assert "r.json (NVIDIA H200, 2026-01-02): 6 rows" in answer["notes"][0]
    assert answer["recommended"] == "fp8-block"
    other = run(*arguments, "--results", results, "--chip", "h100").json
    assert "left out" in other["notes"][0]
    assert {row["time"] for row in other["recipes"]} == {"roofline"}
    assert run(*arguments, "--min-sqnr", "200").json["recommended"] == "bf16"
    shown = run(*arguments[:-1], "--results", results).out
    assert "a roofline is what no kernel can beat" in shown
    assert "has no products of nvfp4: it multiplies bf16 copies" in shown
    folded = run(*arguments[:4], "mxfp8,mxfp8-folded", "--results", results)
    assert re.search(r"no products of mxfp8: .* For mxfp8, products=.folded. .mxfp8-folded. multiplies FP8", folded.out)
    assert re.search(r"mxfp8-folded .*0.120 ms +measured", folded.out), "what computes it was measured"


def test_a_gemm_of_values_has_the_time_of_values(tmp_path: Path, run: Any) -> None:
    """A recipe whose dgrad and wgrad are high precision was given the time of three FP8 GEMMs, as measured."""
    recipe = tmp_path / "forward.json"
    recipe.write_text(octavo.BlockScaling(dgrad="high_precision", wgrad="high_precision").to_json())
    arguments = ["advise", "--shape", "2,64,32,128", "--recipes", str(recipe), "--json", "--results"]
    both = written(tmp_path / "both.json", timed(("bf16", 100, 99, 101), ("block", 40, 39, 41)))
    (row,) = run(*arguments, both).json["recipes"]
    assert (row["us"], row["time"]) == (240.0, "measured")
    (row,) = run(*arguments, written(tmp_path / "block.json", timed(("block", 40, 39, 41)))).json["recipes"]
    assert row["time"] == "roofline"


@pytest.mark.parametrize("median", [math.nan, -5, 0, True, "fast", None])
def test_a_median_that_is_no_time_is_refused(tmp_path: Path, run: Any, median: object) -> None:
    """NaN was the smallest of all, or never; others were tracebacks."""
    results = written(tmp_path / "r.json", timed(("bf16", median, 99, 101)))  # type: ignore[arg-type]
    result = run("advise", "--shape", "2,64,32,128", "--results", results)
    assert result.code == 2
    assert "which is not a time; name a file of octavo bench gemm" in result.err
    arguments = ("advise", "--shape", "2,64,32,128", "--results")
    assert run(*arguments, written(tmp_path / "r.json", {"rows": ["x"]})).code == 2
    newer = run(*arguments, written(tmp_path / "r.json", {**timed(("bf16", 1, 1, 1)), "schema_version": 2}))
    assert newer.code == 2
    assert "r.json has schema_version 2, and this octavo reads 1" in newer.err


def test_quantizers_count_where_experts_have_few_rows(run: Any) -> None:
    """128 experts of 16 rows: making the weights' codes for one micro-batch takes longer than products of codes save;
    shared by many it does not."""
    arguments = ["advise", "--shape", "128,2048,1536,2048", "--recipes", "bf16,fp8-block"]
    alone, shared = (run(*arguments, "--micro-batches", count, "--json").json for count in ("1", "64"))
    assert (alone["recommended"], shared["recommended"]) == ("bf16", "fp8-block")
    plain, block = alone["recipes"]
    assert plain["quantizing_us"] == 0
    assert block["us"] < plain["us"] < block["us"] + block["quantizing_us"]
    of_weights = 2 * 128 * 1536 * 2048 + 128 * 1536 * 2048  # read in bf16, one plane of codes
    assert block["quantizing_us"] > of_weights / 4.8e12 * 1e6 > shared["recipes"][1]["quantizing_us"]
    shown = run(*arguments, "--micro-batches", "1").out
    assert "Products of codes would take less time, but making the codes takes more than that." in shown


@pytest.mark.parametrize(("shape", "said"), [("4,64,64,128", True), ("32,7168,4096,32768", False)])
def test_a_layer_that_is_shorter_than_its_launches_is_told_so(run: Any, shape: str, said: bool) -> None:
    """A roofline of microseconds promises a gain that Python's part of the call hides."""
    shown = run("advise", "--shape", shape, "--recipes", "bf16,fp8-block").out
    assert ("outside of a CUDA graph no recipe makes this layer faster" in shown) == said


def test_a_small_layer_keeps_digits_to_compare(run: Any) -> None:
    """0.0 MB and 0.000 ms in every row would say nothing of a layer that somebody tries first."""
    shown = run("advise", "--shape", "4,64,64,128").out
    assert not re.search(r" 0\.0+ (MB|ms)", shown)
    assert len(set(re.findall(r"fp8-\w+ .* ([\d.]+) KB", shown))) > 1
    rows = run("advise", "--shape", "4,64,64,128", "--json").json["recipes"]
    assert all(row["us"] > 0 for row in rows)


def test_advice_judges_by_the_weights_that_are_given(tmp_path: Path, seed: int, run: Any) -> None:
    """Outliers that cost a whole expert's scale its SQNR leave block scales theirs."""
    values = np.random.default_rng(seed).standard_normal((2, 256, 512)) * 1e-4
    values[:, 0, 0] = 400
    path = tmp_path / "w.safetensors"
    save_file({"w": values.astype(ml_dtypes.bfloat16), "other": np.ones((4, 7), np.float32)}, path)
    arguments = ["advise", "--shape", "2,512,256,1024", "--weights", str(path), "--recipes", "fp8-current,fp8-block"]
    result = run(*arguments, "--json", "--min-sqnr", "-99")
    assert "1 of the tensors" in result.json["judged_by"]
    refused = run("advise", "--shape", "2,64,32,128", "--weights", str(path))
    assert refused.code == 2
    assert "K = 64" in refused.err


TABLE = [
    (["--shape", "1,2,3"], "--shape is '1,2,3'"),
    (["--shape", "1,2,3,0"], "--shape is '1,2,3,0'"),
    (["--shape", "a,b,c,d"], "--shape is 'a,b,c,d'"),
    (["--shape", "1,2,3,4", "--chip", "a100"], "--chip is 'a100'"),
    (["--shape", "1,2,3,4", "--recipes", ","], "--recipes is empty"),
    (["--shape", "1,2,3,4", "--min-sqnr", "nan"], "--min-sqnr is nan"),
    (["--shape", "1,2,3,4", "--results", "absent.json"], "absent.json"),
    (["--shape", "1,2,3,4", "--rows", "-1"], "--rows is -1"),
    (["--shape", "1,2,3,4", "--micro-batches", "0"], "--micro-batches is 0"),
]


@pytest.mark.parametrize(("arguments", "named"), TABLE, ids=[" ".join(row[0]) for row in TABLE])
def test_a_wrong_argument_is_one_line(arguments: list[str], named: str, run: Any) -> None:
    """Exit code 2."""
    result = run("advise", *arguments)
    assert result.code == 2
    assert named in result.err
    assert len(result.err.strip().splitlines()) == 1


def test_nothing_is_advised_where_nothing_keeps_enough(seed: int) -> None:
    """None, rather than the least bad."""
    weights = np.random.default_rng(seed).standard_normal((1, 64, 64)).astype(ml_dtypes.bfloat16)
    one = advice_on("nvfp4", octavo.recipe("nvfp4"), Shape(1, 64, 64, 64), weights, CHIPS["h100"], {})
    assert math.isfinite(one.sqnr_db)
    assert best([one], 60) is None
    assert best([one], 5) is one
