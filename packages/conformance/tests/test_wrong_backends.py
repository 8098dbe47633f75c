"""Each planted fault fails the test that is meant for it, and the honest backend passes it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class Planted:
    """The tests that a fault must fail, tests that it must leave alone, and words of the cases that are run.

    Of a test that it must leave alone one case runs, the first that has the first of these words.
    """

    fails: set[str]
    spares: set[str]
    cases: str


BITS = "quantizer::test_bits"
SUBNORMAL = "quantizer::test_bits_of_subnormal_inputs"
EDGES = "quantizer::test_bits_where_scales_turn"
PRODUCT = "gemm::test_product_is_within_its_bound"
OTHER_PRODUCT = "gemm::test_product_of_what_else_is_declared"
REPEATS = "gemm::test_gemm_repeats_bitwise"
EMPTY = "gemm::test_all_groups_empty"
BIAS = "gemm::test_bias_is_added"
ZERO_TAIL = "tails::test_rows_past_the_sum_are_zero"
ORDER = "properties::test_order_and_empty_groups"
ALONE = "properties::test_a_group_alone_with_its_offset"
POSITION = "quantizer::test_stochastic_bits_for_any_seed_operand_and_group"
POISON = "tails::test_nan_past_the_sum_changes_no_bit"
CODES_POISON = "properties::test_poisoned_tail_changes_no_bit"
ACT = "fused::test_activation_and_quantize"
GRADIENT = "fused::test_gradient_and_quantize"
NORM = "fused::test_normalization_and_quantize"
VALUES = "fused::test_activation_without_codes"
GRADIENT_VALUES = "fused::test_gradient_without_codes"
GEMM_READS = "host_sync::test_gemm_reads_no_value"
QUANTIZE_READS = "host_sync::test_quantize_reads_no_value"
INTERLEAVED = "interleaved_codes::test_codes_of_interleaved_rows"
INTERLEAVED_AMAX = "interleaved_codes::test_amax_of_interleaved_rows"
INTERLEAVED_AGAIN = "interleaved_codes::test_codes_of_interleaved_rows_are_written_again"
INTERLEAVED_READ = "interleaved_weights::test_products_of_interleaved_rows"
INTERLEAVED_SUMMED = "interleaved_weights::test_gradients_of_interleaved_rows"
WRITES_X = "inputs::test_quantize_writes_no_input"
WRITES_W = "inputs::test_quantize_writes_no_weight"
WRITES_OPERANDS = "inputs::test_gemm_writes_no_input"
CODES_OUTLIVE = "inputs::test_codes_outlive_the_next_call"
OUTLIVES = "inputs::test_a_result_outlives_the_next_call"
PACKED = "parts::test_codes_of_packed_weights"
AMAX = "parts::test_codes_and_amax_in_one_pass"
RECORDED = "delayed::test_an_amax_is_recorded"
NEXT_SCALES = "delayed::test_scales_of_the_next_step"
AGAIN = "recorder::test_a_pass_is_made_again_on_other_arrays"
FORMS = "two_forms::test_gemms_read_both_forms"
TOKEN_FORMS = "two_forms::test_gemms_read_both_forms_of_tokens"
FUSED_FORMS = "two_forms::test_gemms_read_both_forms_of_what_is_fused"
MULTIPLIED = "two_forms::test_gemms_read_multiplied_planes"
TOKENS_MULTIPLIED = "two_forms::test_gemms_read_multiplied_planes_of_tokens"
WIDTHS = "quantizer::test_bits_with_sizes_of_either_width"
GEMM_WIDTHS = "gemm::test_sizes_of_either_width"
DEQUANTIZED = "quantizer::test_dequantized_bits"
DEQUANTIZED_WEIGHTS = "quantizer::test_dequantized_bits_of_weights"
NO_ROWS = "gemm::test_no_rows"
SUMS = "gemm::test_wgrad_accumulates"
OUT = "gemm::test_poisoned_out_is_overwritten"
FP32 = "gemm::test_fp32_result"
NOT_FINITE = "not_finite::test_what_is_not_finite_is_not_lost"
OVERFLOW = "not_finite::test_what_overflows_is_infinite"
TURNED = "gemm::test_weights_that_lie_the_other_way"
STEPS = "optimizer::test_steps_of_adamw"
SCALED = "optimizer::test_scaled_gradients_and_steps_that_are_skipped"
ROWS = "optimizer::test_rows_of_a_larger_tensor"
BATCHES = "batch::test_a_row_has_the_same_bits_in_every_batch"

SWIGLU = "mxfp8.e4m3.swiglu or mxfp8"  # the honest backend has no clamped one, which comes first

FAULTS: dict[str, Planted] = {
    "half-away": Planted({BITS}, {BIAS, REPEATS}, "mxfp8"),
    "flushes": Planted({SUBNORMAL}, {BITS}, "row"),
    "floor-e8m0": Planted({BITS, "properties::test_mx_blocks_do_not_saturate"}, {BIAS}, "mxfp8"),
    "log2-e8m0": Planted({EDGES}, {BIAS, AMAX}, "mxfp8"),
    "no-saturation": Planted({BITS}, {EMPTY, ZERO_TAIL}, "delayed"),
    "wrong-column-scale": Planted({BITS}, {EMPTY, ZERO_TAIL}, "block"),
    "empty-shift": Planted({BITS, ORDER}, {EMPTY, REPEATS}, "current"),
    "no-group-offset": Planted({POSITION, ALONE}, {"quantizer::test_same_seed_same_bits", EMPTY}, "nvfp4"),
    "one-seed": Planted({"quantizer::test_same_seed_same_bits", POSITION}, {ORDER, EMPTY}, "nvfp4"),
    "leaks-tail": Planted({CODES_POISON, POISON}, {BITS, BIAS}, "row"),
    "drops-tail": Planted({ZERO_TAIL, PRODUCT}, {BITS, QUANTIZE_READS}, "block"),
    "reads-payload-tail": Planted({"gemm::test_unspecified_rows_are_not_read"}, {BITS}, "row"),
    "no-bias": Planted({BIAS, "gemm::test_bias_is_scaled_by_row"}, {BITS, PRODUCT, REPEATS}, "row or mxfp8"),
    "scale-of-a-neighbour": Planted({PRODUCT}, {BITS, REPEATS, EMPTY}, "block"),
    "transposed-scales": Planted({PRODUCT}, {BITS, EMPTY}, "block"),
    "stale-tile": Planted({PRODUCT}, {BITS, ZERO_TAIL, REPEATS}, "block"),
    "truncates": Planted({PRODUCT}, {BITS, ZERO_TAIL, REPEATS}, "block"),
    "varies": Planted({REPEATS}, {BITS, EMPTY, PRODUCT}, "bf16 or current"),
    "empty-dw": Planted({PRODUCT, EMPTY, "layer::test_group_size_edges"}, {BITS, REPEATS}, "block"),
    "no-accumulate": Planted({SUMS}, {PRODUCT, REPEATS}, "mxfp8"),
    "uses-out": Planted({OUT}, {PRODUCT, EMPTY}, "block"),
    "unrounded": Planted({ACT}, {BITS}, "mxfp8"),
    "no-probs": Planted({ACT}, {GRADIENT, BITS}, SWIGLU),
    "other-values": Planted({VALUES}, {ACT, BITS}, SWIGLU),
    "other-forward": Planted({GRADIENT_VALUES}, {GRADIENT, VALUES}, SWIGLU),
    "tail-in-dbias": Planted({GRADIENT}, {ACT, NORM}, SWIGLU),
    "no-epsilon": Planted({NORM}, {ACT, GRADIENT}, SWIGLU),
    "sees-batch": Planted({BATCHES}, {BITS, REPEATS}, "row or mxfp8"),
    "tf32": Planted({OTHER_PRODUCT}, {PRODUCT, REPEATS}, "bf16"),
    "up-first": Planted(
        {INTERLEAVED, INTERLEAVED_READ, INTERLEAVED_AGAIN, INTERLEAVED_SUMMED}, {BITS, PRODUCT, REPEATS}, "block"
    ),
    "amax-without-nan": Planted({INTERLEAVED_AMAX}, {INTERLEAVED, BITS}, "block"),
    "always-written": Planted({INTERLEAVED_AGAIN}, {INTERLEAVED, INTERLEAVED_AMAX, BITS}, "block"),
    "gaps-written": Planted({INTERLEAVED_SUMMED}, {INTERLEAVED, INTERLEAVED_READ, PRODUCT}, "block"),
    "writes-x": Planted({WRITES_X, WRITES_W}, {BITS, WRITES_OPERANDS}, "current or block or bf16"),
    "writes-codes": Planted({WRITES_OPERANDS}, {BITS, WRITES_X, WRITES_W}, "block"),
    "writes-sizes": Planted({WRITES_OPERANDS}, {BITS, PRODUCT, WRITES_X}, "block or bf16"),
    "amax-of-tail": Planted({AMAX}, {BITS, CODES_POISON}, "delayed or current"),
    "narrow-sizes": Planted({WIDTHS, GEMM_WIDTHS}, {BITS, PRODUCT}, "block"),
    "one-plane": Planted({DEQUANTIZED_WEIGHTS}, {BITS, DEQUANTIZED}, "row or block"),
    "needs-rows": Planted({NO_ROWS}, {EMPTY, PRODUCT}, "block"),
    "adds-fp32": Planted({SUMS}, {PRODUCT, OUT}, "mxfp8"),
    "returns-alone": Planted({OUT, SUMS}, {PRODUCT, EMPTY}, "block or mxfp8"),
    "fused-offset": Planted({ACT}, {BITS, ALONE, NORM}, "nvfp4 or mxfp8"),
    "swallows-nan": Planted({NOT_FINITE}, {PRODUCT, BITS}, "row or bf16"),
    "clamps": Planted({OVERFLOW}, {PRODUCT, NOT_FINITE}, "row or bf16"),
    "other-plane": Planted({TURNED}, {PRODUCT, BITS}, "mxfp8"),
    "unpromoted": Planted({FP32}, {PRODUCT, BITS, REPEATS}, "row"),
    "short-seed": Planted({STEPS, SCALED, ROWS}, {BITS}, "bf16 or row"),
    "never-skips": Planted({SCALED}, {STEPS, ROWS}, "bf16"),
    "all-from-row-0": Planted({ROWS}, {STEPS, SCALED}, "bf16"),
    "records-nan": Planted({RECORDED}, {NEXT_SCALES, AMAX}, "delayed"),
    "infinite-scales": Planted({NEXT_SCALES}, {RECORDED, AMAX}, "delayed"),
    "stale-weights": Planted({AGAIN}, {PRODUCT, REPEATS}, "row.fprop"),
    "unnumbered": Planted({AGAIN}, {PRODUCT, REPEATS}, "row.fprop"),
    "truncated-values": Planted({FORMS, FUSED_FORMS, MULTIPLIED, TOKENS_MULTIPLIED}, {BITS, PRODUCT}, "mxfp8"),
    "truncated-when-fused": Planted({FUSED_FORMS, MULTIPLIED}, {FORMS, TOKENS_MULTIPLIED, PRODUCT}, "mxfp8"),
    "loses-codes-beside": Planted({MULTIPLIED, TOKENS_MULTIPLIED}, {FORMS, FUSED_FORMS, BITS}, "mxfp8"),
    "other-codes": Planted({FORMS, FUSED_FORMS}, {BITS, PRODUCT}, "mxfp8"),
    "tokens-for-choices": Planted({TOKEN_FORMS, TOKENS_MULTIPLIED}, {FORMS, FUSED_FORMS, MULTIPLIED}, "mxfp8"),
    "needs-both-planes": Planted({FORMS, FUSED_FORMS, TOKEN_FORMS}, {BITS, PRODUCT}, "mxfp8"),
    "one-buffer": Planted({CODES_OUTLIVE, OUTLIVES}, {BITS, PRODUCT, REPEATS}, "row or mxfp8"),
    "stale-codes": Planted({CODES_OUTLIVE}, {BITS, WRITES_X}, "row"),
    "no-result": Planted({BITS, PRODUCT}, {NORM}, "row.e4m3 or row.fprop or mxfp8.e4m3.rms or mxfp8"),
    "high-nibble-first": Planted({PACKED}, {BITS, AMAX}, "row or block"),
    "other-spec": Planted({BITS}, {PRODUCT}, "row"),
    "other-sizes": Planted({BITS}, {PRODUCT}, "row"),
    "writes-fused": Planted({ACT, GRADIENT, NORM}, {BITS, WRITES_X}, SWIGLU),
    "unwanted": Planted({GRADIENT, NORM, VALUES}, {ACT, BITS}, SWIGLU),
    "writes-before": Planted({OUT, RECORDED, STEPS, ROWS}, {PRODUCT, BITS}, "block or delayed or bf16"),
    "writes-behind": Planted(
        {SUMS, NEXT_SCALES, SCALED, INTERLEAVED_AGAIN}, {PRODUCT, BITS}, "block or mxfp8 or delayed or bf16"
    ),
    "syncs": Planted({GEMM_READS, QUANTIZE_READS}, {BITS, EMPTY, ZERO_TAIL}, "block"),
}


GAPS = Path(__file__).parent / "plugins" / "numpy.gaps.toml"


def _selections(planted: Planted) -> list[tuple[list[str], list[str], bool]]:
    """As plugins/selected.py takes them: the named tests, each once or twice."""
    cases = planted.cases.split(" or ")
    return [
        (sorted(name.partition("::")[2] for name in names), cases, one)
        for names, one in ((planted.fails, False), (planted.spares, True))
    ]


@pytest.fixture(scope="module")
def wrong(suite: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """All wrong backends and the honest one in one process, on the tests that the table names."""
    selected = {f"numpy-{fault}": _selections(planted) for fault, planted in FAULTS.items()}
    selected["numpy-honest"] = [each for planted in FAULTS.values() for each in _selections(planted)]
    file = tmp_path_factory.mktemp("selected") / "selected.json"
    file.write_text(json.dumps(selected))
    backends = [argument for name in selected for argument in ("--octavo-backend", name)]
    return suite(*backends, "-p", "selected", "--selected", str(file), "-k", "numpy", "--tb=no", "-p", "unshrunk")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_fails_its_test(wrong: Any, fault: str) -> None:
    """The tests named in the table fail, with a reason in the report, and tests of other things pass."""
    backend, planted = f"numpy-{fault}", FAULTS[fault]
    failed = wrong.ids("failed", backend)
    seed = f"on the inputs of --octavo-seed {wrong.report['seed']}"
    assert planted.fails <= failed, f"{fault} is not found by {sorted(planted.fails - failed)} {seed}"
    assert not planted.spares & failed, f"{fault} also fails {sorted(planted.spares & failed)} {seed}"
    assert planted.spares <= wrong.ids("passed", backend)
    rows = [row for row in wrong.report["rows"] if row["backend"] == backend and row["outcome"] == "failed"]
    assert all(row["reason"] for row in rows)


def test_what_is_no_result_is_named(wrong: Any) -> None:
    """With the backend and what was needed, and not as an attribute that None has not."""
    rows = [row for row in wrong.report["rows"] if (row["backend"], row["outcome"]) == ("numpy-no-result", "failed")]
    said = {row["part"]: row["reason"] for row in rows}
    assert "numpy-no-result returned a NoneType where a quantizer returns the GroupedTensor" in said["quantizer"]
    assert "numpy-no-result returned a NoneType where an array of numpy is needed" in said["gemm"]


def test_the_honest_backend_passes_them(wrong: Any) -> None:
    """What fails wrong backends passes for the backend that they were made from, on the same inputs.

    It promises nothing about batches, so that test skips it.
    """
    named = set().union(*(planted.fails | planted.spares for planted in FAULTS.values())) - {BATCHES}
    seed = f"on the inputs of --octavo-seed {wrong.report['seed']}"
    assert not wrong.ids("failed", "numpy-honest"), seed
    assert named <= wrong.ids("passed", "numpy-honest"), seed


@pytest.mark.slow
def test_the_honest_backend_passes_everything(suite: Any) -> None:
    """Every test, on inputs of a fresh seed; its one gap is declared, with the reason."""
    run = suite("--octavo-backend", "numpy-honest", "--octavo-gaps", str(GAPS), "--tb=short")
    assert run.code == 0, run.output[-6000:]
    assert not run.ids("failed")
    assert run.ids("gap") == {"host_sync::test_no_forbidden_frame_in_quantize"}
    assert not run.report["unused_gaps"]


def test_an_undeclared_capability_is_a_warning(suite: Any) -> None:
    """NVFP4 works and is not on the card: the probe says so, and tests of it skip with the registry's reason."""
    run = suite("--octavo-backend", "numpy-undeclared", "-k", "nothing_works_undeclared or test_bits[")
    assert run.code == 0, run.output[-6000:]
    assert run.ids("undeclared") == {"undeclared::test_nothing_works_undeclared"}
    assert "UndeclaredCapability" in run.output
    skipped = [row for row in run.report["rows"] if row["outcome"] == "skipped"]
    assert skipped
    assert all("nvfp4" in row["reason"] and row["capability"]["recipe"] == "nvfp4" for row in skipped)


def test_a_heavy_card_is_found(suite: Any) -> None:
    """A plugin module that imports numpy fails the card part."""
    run = suite("--octavo-backend", "numpy-heavy", "-k", "test_card")
    assert run.ids("failed") == {"card::test_the_card_imports_no_framework"}
    assert "numpy" in next(row["reason"] for row in run.report["rows"] if row["outcome"] == "failed")
