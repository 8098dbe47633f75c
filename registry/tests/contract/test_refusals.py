"""Cards and requests that contradict themselves are refused where they are made."""

from __future__ import annotations

from typing import Any

import pytest

from octavo import MXFP8, RecipeError
from octavo_registry.contract.cards import BackendCard
from octavo_registry.contract.hookspecs import API_LEVEL
from octavo_registry.contract.request import MoveRequest, Request

QUANTIZE = {"op": "quantize", "quantizer": MXFP8().quantizer("x")}


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arch": [9, 0]}, r"arch is \[9, 0\]; give a capability such as \(9, 0\), or None"),
        ({"arch": "90"}, r"arch is '90'; give"),
        ({"weight": "NK"}, "weight is 'NK'; give 'nk' or 'kn'"),
        ({"op": "quantize", "quantizer": "mxfp8"}, "quantizer is 'mxfp8'; a quantize request names a QuantizerSpec"),
        ({**QUANTIZE, "layouts": "plain"}, "layouts is 'plain'; give the names of two, of the rowwise and the"),
        ({**QUANTIZE, "layouts": ["plain", "plain"]}, r"layouts is \['plain', 'plain'\]; give"),
        ({**QUANTIZE, "op": "dequantize", "layouts": ("plain", None)}, r"layouts is \('plain', None\); give"),
    ],
)
def test_a_request_says_how_a_field_is_written(changes: dict[str, Any], message: str, fakes: Any) -> None:
    """Each backend's card would be called unreadable, for no fault of its own, or a TypeError name no field."""
    with pytest.raises(ValueError, match=message):
        fakes.request(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"needs": "torch>=2.11"}, r"needs: got 'torch>=2.11'; needs a tuple, such as \('torch>=2.11',\)"),
        ({"name": "My Chip"}, r"name: got 'My Chip'; needs text that matches \^\[a-z0-9\]"),
        ({"capabilities": ()}, r"capabilities: got \(\); needs at least 1 of them"),
    ],
)
def test_a_card_says_how_a_field_is_written(changes: dict[str, Any], message: str, fakes: Any) -> None:
    """A comma that is missing, for instance, which makes no tuple."""
    given = {"name": "a", "api_level": API_LEVEL, "capabilities": (fakes.row(),)}
    with pytest.raises(RecipeError, match=message):
        BackendCard(**given | changes)


def test_one_row_by_itself_is_no_table(fakes: Any) -> None:
    """A row is told from the table of rows that a card needs, instead of being taken apart."""
    with pytest.raises(RecipeError, match=r"capabilities: got one Capability by itself; give a tuple of it"):
        BackendCard(name="a", api_level=API_LEVEL, capabilities=fakes.row())
