"""A new package for JAX works as it is made: its GEMMs are right, and nothing of its card stays untried by name."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from sessions.xla import xla_settings

from octavo_cli.new import create

START = "from octavo_registry.cli import main; main()"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A package made from the template, on the path as `pip install -e` would leave it there."""
    source = create("zenith", tmp_path_factory.mktemp("new"), "jax") / "src"
    info = source / "zenith_octavo-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: zenith-octavo\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[octavo.backends]\nzenith = zenith_octavo.plugin\n")
    path = os.pathsep.join([str(source), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, **xla_settings("in a hurry"), "PYTHONPATH": path}


def _conform(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", START, "conform", "zenith", "-q", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_its_gemms_are_right(environment: dict[str, str]) -> None:
    """Each GEMM with empty groups and a tail, without rows, and into an accumulator; and the card."""
    chosen = "test_card or ((test_product_is_within or test_all_groups_empty) and row)"
    run = _conform(environment, "-k", chosen)
    assert run.returncode == 0, (run.stdout + run.stderr)[-4000:]


@pytest.mark.slow
def test_the_whole_suite_passes(environment: dict[str, str]) -> None:
    """Everything that the card declares, in about two minutes of compilation."""
    run = _conform(environment)
    assert run.returncode == 0, (run.stdout + run.stderr)[-4000:]
