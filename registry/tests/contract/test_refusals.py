"""Cards and requests that contradict themselves are refused where they are made."""

from __future__ import annotations

from typing import Any

import pytest

from octavo_registry.contract.request import MoveRequest, Request


def test_bounds_of_a_row_are_in_order(fakes: Any) -> None:
    """A row that no device fits would refuse all of them with a sentence about each."""
    with pytest.raises(ValueError, match=r"min_arch=\(10, 0\) is above max_arch=\(9, 0\); swap them"):
        fakes.row(min_arch=(10, 0), max_arch=(9, 0))
    assert fakes.row(min_arch=(9, 0), max_arch=(9, 0)).min_arch == (9, 0)


@pytest.mark.parametrize(
    ("kind", "op", "message"),
    [
        (Request, "gprop", "op is 'gprop'; known operations are .*fprop"),
        (MoveRequest, "fprop", "op is 'fprop'; a MoveRequest is for combine_rows, "),
    ],
)
def test_a_request_is_for_an_operation_of_its_class(kind: Any, op: str, message: str) -> None:
    """An operation that nobody knows would be refused by every backend, as if they were to blame."""
    with pytest.raises(ValueError, match=message):
        kind(op, "torch", "cpu", "bfloat16", "bfloat16")
