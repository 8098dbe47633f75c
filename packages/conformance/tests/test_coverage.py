"""A run in which something declared never ran fails, whatever the rest did, and says what refused it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

GAPS = """
[[gap]]
test = "host_sync::test_no_forbidden_frame_in_quantize[*"
kind = "notimpl"
reason = "it calls the definition, which validates its arguments with pydantic on every call"
"""


@pytest.fixture(scope="module")
def gaps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the honest quantizer is known for."""
    file = tmp_path_factory.mktemp("gaps") / "gaps.toml"
    file.write_text(GAPS)
    return file


@pytest.fixture(scope="module")
def never(suite: Any, gaps: Path) -> Any:
    """Every test on a backend whose GEMMs are refused when they are bound."""
    return suite("--octavo-backend", "numpy-never", "--octavo-gaps", str(gaps), "--octavo-skips", "--tb=short")


def test_what_never_ran_fails_the_run(never: Any) -> None:
    """All other tests pass or skip: without this the exit code would be 0."""
    rows = [row for row in never.report["rows"] if row["outcome"] == "failed"]
    assert never.code == 1, never.output[-4000:]
    assert {row["part"] for row in rows} == {"coverage"}
    assert {row["capability"]["op"] for row in rows} == {"fprop", "dgrad"}
    reasons = {row["id"].partition(": ")[2]: row["reason"] for row in rows}
    assert reasons["fprop in block"] == (
        "fprop in block is declared, and no test of it ran: fprop: the library for fprop is not linked"
    )
    assert set(reasons) == {"fprop in block", "dgrad in block"}
    assert never.report["counts"]["failed"] == len(rows)


def test_the_terminal_says_so(never: Any) -> None:
    """By reason, with what to do."""
    assert f"{never.report['counts']['failed']} declared capabilities never ran, so the run fails:" in never.output
    assert ": the library for fprop is not linked" in never.output
    assert "list it as a gap" in never.output


def test_skips_are_listed_by_reason(never: Any) -> None:
    """With their number and one of them."""
    assert f"{never.report['counts']['skipped']} skipped, by reason:" in never.output
    assert "serves quantize, fprop" not in never.output  # a reason names what was asked for
    assert "the recipe is mxfp8" in never.output


def test_a_narrow_card_is_tested_for_what_it_declares(suite: Any, gaps: Path) -> None:
    """Row data alone, from float16 alone: the selection has neither, so tests are made for the card."""
    run = suite("--octavo-backend", "numpy-narrow", "--octavo-gaps", str(gaps), "--tb=short")
    failed = [row["reason"] for row in run.report["rows"] if row["outcome"] == "failed"]
    assert not failed
    assert run.code == 0, run.output[-4000:]
    passed = {row["id"].partition("[")[0] for row in run.report["rows"] if row["outcome"] == "passed"}
    assert {"gemm::test_product_of_what_else_is_declared", "quantizer::test_bits_of_what_else_is_declared"} <= passed
    # and like any other backend, in the dtype that it has
    assert {"gemm::test_poisoned_out_is_overwritten", "gemm::test_long_odd_sums", "gemm::test_no_rows"} <= passed
    assert {"bad_sizes::test_device_sizes_are_clamped_by_gemms", "properties::test_group_locality"} <= passed


FOUND: dict[str, set[str]] = {
    "numpy-honest-block": set(),
    "numpy-honest-row": set(),  # of bf16 alone, in which nothing overflows as in fp16
    "numpy-no-accumulate-block": {"gemm::test_wgrad_accumulates"},
    "numpy-no-scales-row": {"gemm::test_bias_is_scaled_by_row"},
}


@pytest.fixture(scope="module")
def one_recipe(suite: Any, gaps: Path) -> Any:
    """Backends of one recipe each, in one process."""
    tests = "accumulates or bias_is or long_sums or fp32_result or clamped or many_groups or odd_shapes or overflows"
    tests += " or amax_in_one_pass"
    backends = [argument for backend in FOUND for argument in ("--octavo-backend", backend)]
    return suite(*backends, "--octavo-gaps", str(gaps), "--tb=short", "-k", tests)


@pytest.mark.parametrize("backend", FOUND)
def test_one_recipe_is_tested_like_any_other(backend: str, one_recipe: Any) -> None:
    """The quick selection has accumulators, factors of a bias and long sums in MXFP8: a backend without it passed with
    none of them tried, and a gradient that is not added was nobody's failure."""
    failed = one_recipe.ids("failed", backend)
    assert failed == FOUND[backend], one_recipe.output[-4000:]
    everything = one_recipe.ids("passed", backend) | failed
    assert {"gemm::test_long_sums", "gemm::test_fp32_result", "gemm::test_wgrad_accumulates"} <= everything
    assert {"layer::test_many_groups", "layer::test_odd_shapes", "gemm::test_bias_is_added"} <= everything


def test_rows_are_not_left_to_weights(one_recipe: Any) -> None:
    """The selection has rows in fp32 and weights in bf16: of a backend of bf16 alone, both are tried in that."""
    passed = {row["id"] for row in one_recipe.report["rows"] if row["outcome"] == "passed"}
    test = "parts::test_codes_and_amax_in_one_pass[numpy-honest-row-cpu-row.e4m3.pow2"
    assert {f"{test}-bfloat16]", f"{test}.stacked-bfloat16]"} <= passed, one_recipe.output[-4000:]


def test_a_selection_is_not_judged(suite: Any) -> None:
    """`-k` leaves most of it out on purpose."""
    run = suite("--octavo-backend", "numpy-never", "-k", "plain_data")
    assert run.code == 0
    assert "a selection ran" in run.output


def test_a_misspelt_recipe_is_named(suite: Any) -> None:
    """With what was meant."""
    run = suite("--octavo-backend", "numpy-misspelt", "-k", "recipes_that_exist")
    (row,) = run.report["rows"]
    assert row["outcome"] == "failed"
    assert "names the recipe 'blokc', which nobody defines; did you mean block?" in run.output
