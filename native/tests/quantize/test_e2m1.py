"""E2M1 codes by additions and a minimum, as the CUDA kernels make them, against the definition's steps."""

from __future__ import annotations

from pathlib import Path

from compiled import lines_of, needs_compiler

HERE = Path(__file__).resolve().parent


@needs_compiler
def test_codes_of_all_magnitudes_are_those_of_the_definition(tmp_path: Path) -> None:
    """Ties, subnormals, what saturates, infinity and NaN, at every place of a word (numerics.md, E2M1)."""
    assert lines_of(HERE / "e2m1.cpp", tmp_path) == []
