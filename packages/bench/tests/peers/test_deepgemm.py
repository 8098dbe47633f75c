"""DeepGEMM beside our GEMMs, by a stand-in: the layouts that it is given, its products, and what is said without it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from deepgemm_stand_in import deep_gemm

from octavo.recipe_base import GEMMS, Gemm
from octavo_bench.errors import AbsentError
from octavo_bench.gemm import work
from octavo_bench.harness.recipes import GemmCase
from octavo_bench.peers.deepgemm import FUNCTIONS, deepgemm_call
from octavo_bench.peers.peer import peers_of

N, K = 144, 272
SIZES = (256, 0, 128)
BENCH = ["bench", "gemm", "--device", "cpu", "--backend", "torch-reference", "--repeats", "1", "--no-fast"]
TINY = [*BENCH, "--shape", "3,128,144,384"]


@pytest.fixture
def operands(seed: int) -> dict[str, torch.Tensor]:
    """x, w and dy of ragged groups; sides that are no multiples of a block."""
    draw = torch.Generator().manual_seed(seed)
    sides = {"x": (sum(SIZES), K), "w": (len(SIZES), N, K), "dy": (sum(SIZES), N)}
    return {name: torch.randn(side, generator=draw).to(torch.bfloat16) for name, side in sides.items()}


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The stand-in in the library's place."""
    module = deep_gemm()
    monkeypatch.setitem(sys.modules, "deep_gemm", module)
    return module


def _expected(operands: dict[str, torch.Tensor], gemm: Gemm) -> torch.Tensor:
    x, w, dy = (operands[name].float() for name in ("x", "w", "dy"))
    parts = list(zip(x.split(SIZES), w, dy.split(SIZES), strict=True))
    if gemm == "wgrad":
        return torch.stack([dy_g.T @ x_g for x_g, _, dy_g in parts])
    return torch.cat([x_g @ w_g.T if gemm == "fprop" else dy_g @ w_g for x_g, w_g, dy_g in parts])


@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("dtype", ["fp8", "bf16"])
def test_it_is_given_the_operands_that_it_documents(
    dtype: str, gemm: Gemm, operands: dict[str, torch.Tensor], library: Any
) -> None:
    """The stand-in refuses other layouts, and the result is the product within the rounding of both operands."""
    call = deepgemm_call(operands, SIZES, gemm, dtype=dtype)
    result, expected = call(), _expected(operands, gemm)
    assert library.calls == [FUNCTIONS[dtype, gemm]]
    assert result.dtype is (torch.float32 if gemm == "wgrad" else torch.bfloat16)
    error = (result.float() - expected).norm() / expected.norm()
    # E4M3 rounds to 2^-4 of a value at most, bf16's results to 2^-8
    assert error < (2.0**-4 if dtype == "fp8" else 2.0**-8)
    if gemm == "wgrad":
        once = result.clone()
        assert torch.allclose(call(), 2 * once), "sums are added to"


def test_groups_that_its_layout_does_not_take_are_not_comparable(
    operands: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padding them would be other work; the alignment is what the library says."""
    monkeypatch.setitem(sys.modules, "deep_gemm", deep_gemm(alignment=192))
    for gemm in GEMMS:
        with pytest.raises(ValueError, match="not comparable: its layout takes groups in multiples of 192 rows"):
            deepgemm_call(operands, SIZES, gemm, dtype="fp8")


def test_a_library_that_is_absent_or_lacks_a_function_says_so(
    operands: dict[str, torch.Tensor], library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the name of what is missing and the version, so that its user knows what to install."""
    del library.m_grouped_bf16_gemm_nn_contiguous
    with pytest.raises(AbsentError, match=r"deep_gemm 2.6.1 has no m_grouped_bf16_gemm_nn_contiguous"):
        deepgemm_call(operands, SIZES, "dgrad", dtype="bf16")
    deepgemm_call(operands, SIZES, "fprop", dtype="bf16")
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    with pytest.raises(AbsentError, match="DeepGEMM is not measured: it is not installed"):
        deepgemm_call(operands, SIZES, "fprop", dtype="bf16")


def test_it_is_the_closest_peer_of_block_scaling_and_of_bf16() -> None:
    """Accumulating wgrads beside its own, which add to fp32; stored ones and other recipes have none."""
    assert peers_of(GemmCase("block", "fprop"))[0] == "DeepGEMM fp8"
    assert peers_of(GemmCase("block", "wgrad", accumulate=True))[0] == "DeepGEMM fp8 += fp32"
    assert peers_of(GemmCase("bf16", "wgrad", accumulate=True))[0] == "DeepGEMM bf16 += fp32"
    assert not any(
        "DeepGEMM" in name for kind in ("row", "mxfp8", "delayed") for name in peers_of(GemmCase(kind, "fprop"))
    )


def test_rows_and_table_have_it_where_it_is_installed(
    tmp_path: Path, run: Any, library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even groups of 128 rows; each result compared with the product before its time counts.

    The skewed sizes are given here: a draw may put all rows into one group, which its layout takes.
    """
    monkeypatch.setattr(work, "sizes_of", lambda shape, name, seed: (128,) * 3 if name == "even" else (200, 0, 184))
    target = tmp_path / "gemm.json"
    result = run(*TINY, "--sizes", "even,skewed", "--kinds", "bf16,block,row", "--output", str(target))
    assert result.code == 0, result.out[-3000:] + result.err
    content = json.loads(target.read_text())
    rows = {(row["case"], row["gemm"]): row for row in content["rows"] if row["sizes"] == "even"}
    beside = {key for key, row in rows.items() if any("DeepGEMM" in name for name in row["peer_ratios"])}
    assert beside == {
        *((kind, gemm) for kind in ("bf16", "block") for gemm in ("fprop", "dgrad")),
        *((f"{kind} += fp32", "wgrad") for kind in ("bf16", "block")),
    }
    theirs = [peer for peer in content["peers"] if peer["peer"].startswith("DeepGEMM")]
    assert len(theirs) == 2 * len(FUNCTIONS)
    for peer in theirs:
        timed = peer["us"] is not None
        assert timed is (peer["sizes"] == "even")
        assert peer["match"].startswith("within ") if timed else "not comparable" in peer["note"]
    assert "of DeepGEMM" in result.out
    assert "DeepGEMM fp8 fprop" in result.out
    assert "note: DeepGEMM fp8 fprop: ValueError: not comparable" in result.out


def test_a_run_without_it_says_why_once(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the table as in JSON."""
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    line = [*TINY, "--sizes", "even", "--kinds", "bf16", "--ops", "fprop,dgrad"]
    told = [text for text in run(*line).out.splitlines() if "DeepGEMM is not measured" in text]
    assert len(told) == 1
    assert told[0].startswith("note: DeepGEMM is not measured: it is not installed")
    content = run(*line, "--json").json
    assert [note for note in content["notes"] if "DeepGEMM" in note] == [told[0].removeprefix("note: ")]
    assert {peer["note"] for peer in content["peers"] if "DeepGEMM" in peer["peer"]} == {told[0].removeprefix("note: ")}


def test_a_wrong_or_failing_result_is_a_note_and_no_time(
    run: Any, library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fast for nothing: weights of another group, and a kernel that does not compile."""
    right = library.m_grouped_bf16_gemm_nt_contiguous
    monkeypatch.setattr(
        library, "m_grouped_bf16_gemm_nt_contiguous", lambda a, b, d, layout: right(a, b.flip(0), d, layout)
    )

    def broken(*arguments: Any) -> None:
        raise RuntimeError("NVCC compilation failed")

    monkeypatch.setattr(library, "m_grouped_bf16_gemm_nn_contiguous", broken)
    result = run(*TINY, "--sizes", "even", "--kinds", "bf16", "--ops", "fprop,dgrad", "--json")
    assert result.code == 0
    notes = {peer["gemm"]: peer for peer in result.json["peers"] if peer["peer"] == "DeepGEMM bf16"}
    assert "differs from the product by" in notes["fprop"]["note"]
    assert "RuntimeError: NVCC compilation failed" in notes["dgrad"]["note"]
    assert {peer["us"] for peer in notes.values()} == {None}
    assert not any("DeepGEMM" in name for row in result.json["rows"] for name in row["peer_ratios"])
