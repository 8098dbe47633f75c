"""What a check says of arrays that differ."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest

import octavo_conformance
from octavo_conformance.oracles.checks import assert_equal


def test_values_that_differ_are_shown_with_their_place() -> None:
    """The first of them, its coordinate and both values; zeros of either sign are equal."""
    expected = np.array([[0.0, 1.0], [2.0, 3.0]], np.float32)
    assert_equal(np.array([[-0.0, 1.0], [2.0, 3.0]], np.float32), expected, "rowwise")
    with pytest.raises(pytest.fail.Exception) as caught:
        assert_equal(np.array([[0.0, 1.0], [4.0, np.nan]], np.float32), expected, "rowwise")
    assert str(caught.value) == "rowwise: 2 of 4 values differ; first at [1, 0]: got 4.0, needs 2.0"


def test_every_check_of_the_suite_says_what_is_wrong() -> None:
    """An author reads the message, not our source: an assert without one is for a type checker alone."""
    suite = Path(octavo_conformance.__file__).parent / "suite"
    silent = [
        f"{path.name}:{node.lineno}"
        for path in sorted(suite.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assert) and node.msg is None and not ast.unparse(node.test).endswith("is not None")
    ]
    assert not silent, f"give these asserts a message: {', '.join(silent)}"
