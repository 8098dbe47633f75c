"""The stub that type checkers read, compared with what nanobind's stubgen writes of the module."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "stubs.py"

pytest.importorskip("nanobind", reason="nanobind, whose stubgen writes the stub, is not installed")


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("stubs", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_committed_stub_is_the_generated_one(tool: ModuleType) -> None:
    """Names, parameters, defaults, types and docstrings: what a type checker admits is what the module takes."""
    assert tool.meaning(tool.STUB.read_text()) == tool.meaning(tool.generated())


@pytest.mark.parametrize(
    ("found", "instead"),
    [
        ("rowwise: PlaneArgs | None = None", "rowwise: PlaneArgs"),
        ("threads: int = 1", "threads: int = 2"),
        ("row_stride: int", "stride: int"),
        ("Quantize the input", "Quantise the input"),
    ],
)
def test_another_stub_is_told_apart(tool: ModuleType, found: str, instead: str) -> None:
    """The comparison overlooks line breaks and nothing else."""
    stub = tool.STUB.read_text()
    assert found in stub
    assert tool.meaning(stub.replace(found, instead)) != tool.meaning(stub)
    assert tool.meaning(stub.replace("\n\nclass ", "\n\n\nclass ")) == tool.meaning(stub)


def test_a_result_that_stubgen_does_not_write_is_an_error(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A renamed function would silently lose the type of its result."""
    monkeypatch.setitem(tool.RESULTS, "build_information", ("dict", "BuildInfo"))
    with pytest.raises(ValueError, match="build_information"):
        tool.generated()
