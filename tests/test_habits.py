"""What a clone's host runs (workflows, hooks, forms) are the project's own sessions and tools, in the same versions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_noxfile import constant, sessions
from workspace import ROOT, packages

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def _load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def _sessions_run(job: dict[str, Any]) -> set[str]:
    """The nox sessions of a job, once for each value of its matrix."""
    matrix = job.get("strategy", {}).get("matrix", {"": [""]})
    ((name, values),) = matrix.items()
    commands = [step["run"] for step in job["steps"] if step.get("run", "").startswith("nox -s ")]
    found = (command.removeprefix("nox -s ").partition(" -- ")[0].strip('"') for command in commands)
    return {each.replace(f"${{{{ matrix.{name} }}}}", value) for each in found for value in values}


def test_workflows_run_every_session_of_a_change() -> None:
    """A session that is added to `nox` and to no workflow never runs on a pull request, which is green all the same."""
    (path,) = [path for path in WORKFLOWS if path.stem == "change"]
    run = set().union(*(_sessions_run(job) for job in _load(path)["jobs"].values()))
    on_cuda = {f"conformance({backend})" for backend in constant("ON_CUDA")}
    expected = {f"tests({name})" for name in packages()}
    expected |= {f"conformance({backend})" for backend in constant("BACKENDS")} - on_cuda
    # "kernels" is "native" and what ptxas says of every kernel
    expected |= {"kernels", "lint", "types", "docs", "integration", "adapters", "third_party"}
    assert run == expected


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_sessions_that_there_are(path: Path) -> None:
    """A renamed session leaves a workflow behind that fails only after a push."""
    for job in _load(path)["jobs"].values():
        assert {re.split(r"\W", session, maxsplit=1)[0] for session in _sessions_run(job)} <= set(sessions())


def test_hooks_are_the_tools_of_lint() -> None:
    """Two versions of a formatter undo each other's work."""
    wanted = dict(tool.split("==") for tool in constant("TOOLS"))
    hooks = {repo["repo"].rpartition("/")[2]: repo["rev"] for repo in _load(ROOT / ".pre-commit-config.yaml")["repos"]}
    assert hooks == {
        "ruff-pre-commit": f"v{wanted['ruff']}",
        "mirrors-clang-format": f"v{wanted['clang-format']}",
    }


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_forms_ask_for_the_environment(path: Path) -> None:
    """What `octavo doctor --json` prints answers the first three questions of every report."""
    assert any("octavo doctor --json" in field["attributes"]["label"] for field in _load(path)["body"])


def test_a_citation_names_the_released_version() -> None:
    """A release writes it; somebody who edits a version by hand forgets it."""
    assert _load(ROOT / "CITATION.cff")["version"] == packages()["octavo-core"].project["version"]
