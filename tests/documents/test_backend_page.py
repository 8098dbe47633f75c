"""docs/guide/backends.md, followed to the letter: its three files make a package that the suite passes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib

import pytest
from workspace import ROOT

PAGE = (ROOT / "docs" / "guide" / "backends.md").read_text()
START = "from octavo_registry.cli import main; main()"
MOST_WORDS = 2400
"""Ten minutes of reading at the pace of technical prose, tables and code apart."""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The page's files in a folder on the path, with the metadata that `pip install -e .` would leave there."""
    folder = tmp_path_factory.mktemp("page")
    files = dict(re.findall(r"^`([\w./]+)`:\n\n```\w+\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
    assert set(files) == {"pyproject.toml", "acme_gemm/plugin.py", "acme_gemm/backend.py"}
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "acme_gemm" / "__init__.py").touch()
    project = tomllib.loads(files["pyproject.toml"])["project"]
    info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
        + "".join(f"Requires-Dist: {requirement}\n" for requirement in project["dependencies"])
    )
    points = project["entry-points"]["octavo.backends"].items()
    (info / "entry_points.txt").write_text(
        "[octavo.backends]\n" + "".join(f"{name} = {value}\n" for name, value in points)
    )
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def _octavo(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", START, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_the_backend_of_the_page_conforms(environment: dict[str, str]) -> None:
    """Everything that its card declares has run and works."""
    run = _octavo(environment, "conform", "acme-gemm", "-q")
    assert run.returncode == 0, (run.stdout + run.stderr)[-6000:]
    assert re.search(r"gemm +[1-9]\d+ ", run.stdout)


def test_its_layer_is_composed_with_the_quantizer_of_others(environment: dict[str, str]) -> None:
    """The worked step of the page: replace the GEMMs, keep the quantizer."""
    asked = ("why", "layer", "--recipe", "fp8-row", "--device", "cpu", "--backend", "acme-gemm,*")
    run = _octavo(environment, *asked)
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(r"^  fprop +acme-gemm +row", run.stdout, re.MULTILINE)
    assert re.search(r"^  quantize w +torch-\w+ +row", run.stdout, re.MULTILINE)


def test_the_page_reads_in_ten_minutes() -> None:
    """Prose and hand-written tables; code is copied, and the rest is in the contract's page."""
    prose = re.sub(r"^```.*?^```", "", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert len(prose.split()) < MOST_WORDS
