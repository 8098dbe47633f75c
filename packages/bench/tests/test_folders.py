"""The folders of the package: who may import whom, so that a benchmark can be read, moved or dropped alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import octavo_bench

ROOT = Path(octavo_bench.__file__).parent
SHARED = {"harness": set(), "peers": {"harness"}, "training": {"harness", "peers"}}
"""What each shared folder may import beside itself."""
BENCHMARKS = sorted(path.parent.name for path in ROOT.glob("*/benchmark.py") if path.parent.name != "harness")


def _imports(file: Path) -> Iterator[str]:
    """Modules of this package that a file imports, wherever it does."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("octavo_bench."):
            yield node.module


def _used(folder: str) -> set[str]:
    files = (ROOT / folder).rglob("*.py")
    return {module.split(".")[1] for file in files for module in _imports(file)} - {folder, "errors"}


@pytest.mark.parametrize("folder", list(SHARED))
def test_shared_folders_know_no_benchmark(folder: str) -> None:
    """What two benchmarks need is below both."""
    assert _used(folder) <= SHARED[folder]


@pytest.mark.parametrize("folder", BENCHMARKS)
def test_a_benchmark_uses_no_other_benchmarks_files(folder: str) -> None:
    """There are nine, and each stands on the shared folders alone."""
    assert len(BENCHMARKS) == 9
    assert _used(folder) <= set(SHARED)
