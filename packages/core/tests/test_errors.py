"""What errors quote."""

from __future__ import annotations

import pytest

from octavo.errors import RecipeError, one_of


@pytest.mark.parametrize(
    ("value", "names", "message"),
    [
        ("z", ("x", "w", "dy"), "operand is 'z'; give 'x', 'w' or 'dy'"),
        (True, ("keep", "remake"), "operand is True; give 'keep' or 'remake'"),
        (["x"], ("x", "w", "dy"), "operand is a list; give 'x', 'w' or 'dy'"),
        ("e", ("a", "b", "c", "d"), "operand is 'e'; give one of a, b, c, d"),
        ("z" * 1000, ("x", "w"), r"operand is 'z{70,90}\.\.\.; give"),
    ],
)
def test_a_name_that_is_none_of_them(value: object, names: tuple[str, ...], message: str) -> None:
    """The refusal quotes what was given, shortened where it is long, and lists what may be given."""
    with pytest.raises(ValueError, match=message):
        one_of("operand", value, names)
    with pytest.raises(RecipeError, match=message):
        one_of("operand", value, names, RecipeError)
    assert one_of("operand", names[0], names) == names[0]
