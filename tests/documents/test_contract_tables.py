"""The guide's tables of operations, requests and answers: generated from the contract, and complete."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from typing import get_args

import pytest
from workspace import ROOT

from octavo_registry.contract import OPERATIONS, REQUESTS, Bound, Capability, Op

sys.path.insert(0, str(ROOT / "docs" / "_ext"))

import contract_tables

GUIDE = "\n".join((ROOT / "docs" / "guide" / name).read_text() for name in ("backends.md", "backend-contract.md"))


def test_the_guide_shows_every_table_once() -> None:
    """No table is written by hand, and none that can be generated is missing."""
    assert sorted(re.findall(r"^```\{contract\} (\w+)$", GUIDE, re.MULTILINE)) == sorted(contract_tables.TABLES)


@pytest.mark.parametrize("op", get_args(Op))
def test_every_operation_is_there(op: str) -> None:
    """With every argument of its function, and the classes of its request and its answer."""
    (row,) = [line for line in contract_tables.markdown("operations").splitlines() if line.startswith(f"| `{op}(")]
    part = OPERATIONS[op]
    assert f"`{part.request.__name__}`" in row
    assert f"`{part.bound.__name__}`" in row
    for name in list(inspect.signature(part.run.__call__).parameters)[1:]:
        assert re.search(rf"\b{name}\b", row), name


def test_every_field_is_explained() -> None:
    """A field of a request, an answer or a card without a line in its docstring has no row, and fails here."""
    requests, answers = contract_tables.markdown("requests"), contract_tables.markdown("optional")
    for kind in REQUESTS.values():
        for field in dataclasses.fields(kind):
            assert f"| `{field.name}` |" in requests, (kind, field.name)
    for part in OPERATIONS.values():
        for field in dataclasses.fields(part.bound):
            common = field.name in Bound.__dataclass_fields__
            owner = "every answer" if common else f"`{part.bound.__name__}`"
            assert f"| {owner} | `{field.name}` |" in answers, (part.bound, field.name)
    for name in Capability.model_fields:
        assert f"| `{name}` |" in contract_tables.markdown("conditions"), name


def test_the_planes_are_those_of_the_definition() -> None:
    """Shapes are the symbols of `GroupedTensorSpec`'s numbers; a few of them are held by hand."""
    planes = contract_tables.markdown("planes")
    assert (
        "| row | fprop | `x.rowwise` e4m3 [M, K], scales fp32 [M] | `w.rowwise` e4m3 [G, N, K], scales fp32 [G, N] |"
        in planes
    )
    assert "| block | wgrad | `dy.columnwise` e4m3 [M, N], scales fp32 [P, N] " in planes
    assert "`x.rowwise` e4m3 [M, K], scales e8m0 [M, K/32]" in planes
    assert len([line for line in planes.splitlines() if line.startswith("|")]) == 2 + 5 * 3


def test_a_field_without_a_line_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables read docstrings: what is not said there is not made up."""
    bound = OPERATIONS["quantize"].bound
    monkeypatch.setattr(bound, "__doc__", "The answer.\n\n    into  writes over an earlier result\n")
    with pytest.raises(KeyError, match="with_amax"):
        contract_tables.markdown("optional")


def test_every_part_of_the_suite_is_explained() -> None:
    """`octavo conform` prints the names of its parts, and the README of the suite says what each holds a backend to."""
    conformance = ROOT / "packages" / "conformance"
    parts = {path.stem.removeprefix("test_") for path in conformance.glob("src/octavo_conformance/suite/*/test_*.py")}
    _, _, table = (conformance / "README.md").read_text().partition("## The parts\n")
    rows = re.findall(r"^\| (`[^|]*`) \|", table.partition("\n## ")[0], re.MULTILINE)
    assert parts == {part for row in rows for part in re.findall(r"`(\w+)`", row)}


@pytest.mark.parametrize("page", ["docs/guide/backends.md", "registry/README.md"])
def test_plugins_are_told_to_ask_for_a_registry_with_their_level(page: str) -> None:
    """An older registry refuses a card of the newest API level: the examples ask for what the template does."""
    asked = {
        name: re.findall(r'"octavo-registry>=([\d.]+)"', (ROOT / name).read_text())
        for name in (page, "docs/examples/acme-octavo/pyproject.toml")
    }
    assert asked[page] == asked["docs/examples/acme-octavo/pyproject.toml"]
