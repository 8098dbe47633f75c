"""The development tasks: what plain `nox` runs."""

from __future__ import annotations

import ast
import getpass
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from workspace import ROOT, packages, tracked

FILES = (ROOT / "noxfile.py", *tracked("tests/sessions/*.py"))
FUNCTIONS = {
    node.name: node for file in FILES for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)
}


def _run(name: str, **modules: Any) -> Any:
    """A function of the sessions, which import nox: no test has that."""
    text = "from __future__ import annotations\n" + ast.unparse(FUNCTIONS[name])
    exec(compile(text, "noxfile", "exec"), modules)
    return modules[name]


def constant(name: str) -> Any:
    """The value of a constant of the noxfile, or of the modules that it shares with no other program."""
    (node,) = [
        node
        for file in FILES
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
    ]
    return ast.literal_eval(node.value)


def sessions() -> dict[str, list[str]]:
    """Every nox session and its decorators."""
    decorators = {
        name: [ast.unparse(decorator) for decorator in function.decorator_list] for name, function in FUNCTIONS.items()
    }
    return {name: each for name, each in decorators.items() if any(text.startswith("nox.session") for text in each)}


def test_every_session_belongs_to_a_change_or_says_that_it_does_not() -> None:
    """A session that somebody adds is part of `nox`, unless it has `default=False`."""
    text = ast.unparse(FUNCTIONS["_checks"])
    for name, decorators in sessions().items():
        if name != "change" and not any("default=False" in each for each in decorators):
            assert f"'{name}'" in text or f"f'{name}(" in text, f"_checks() does not name {name}"


def test_the_noxfile_imports_every_session() -> None:
    """nox lists the sessions of what noxfile.py imports: one in another module that it does not name is not there."""
    text = (ROOT / "noxfile.py").read_text()
    assert {
        name for name in sessions() if re.search(rf"\bdef {name}\(|^from sessions\.\w+ import .*\b{name}\b", text, re.M)
    } == set(sessions())


def test_every_package_has_its_sessions() -> None:
    """A package that the noxfile does not know is never tested."""
    directories = constant("DIRECTORIES")
    assert directories == {name: str(package.directory.relative_to(ROOT)) for name, package in packages().items()}


def test_a_shim_without_an_interpreter_is_no_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version manager puts a shim on PATH for every version it knows, installed or not, which exits with 127."""
    interpreter = _run("interpreter_of", shutil=shutil, subprocess=subprocess)
    version = "{}.{}".format(*sys.version_info)
    for name, text in (("9.9", "exit 127"), ("9.8", "echo 3.11"), (version, f'exec {sys.executable} "$@"')):
        shim = tmp_path / f"python{name}"
        shim.write_text(f"#!/bin/sh\n{text}\n")
        shim.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert interpreter("9.9") is None
    assert interpreter("9.8") is None
    assert interpreter("9.7") is None
    assert interpreter(version) == str(tmp_path / f"python{version}")


def test_sessions_share_bytecode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package's .pyc lies in one place for all sessions: each would spend seconds on torch's and JAX's."""
    share = _run("share_bytecode", Path=Path, sysconfig=sysconfig)
    files = set()
    for session in ("tests-octavo-torch", "docs", "docs"):  # an environment that is there already, too
        venv = tmp_path / ".nox" / session
        settings = share(SimpleNamespace(cache_dir=tmp_path / "cache", virtualenv=SimpleNamespace(location=str(venv))))
        monkeypatch.setattr(sys, "pycache_prefix", settings["PYTHONPYCACHEPREFIX"])
        packages = sysconfig.get_path("purelib", vars={"base": str(venv)})
        files.add(Path(importlib.util.cache_from_source(f"{packages}/torch/__init__.py")).resolve())
    assert len(files) == 1


def test_packages_are_named_in_a_file_of_requirements(tmp_path: Path) -> None:
    """uv builds what its command line names anew in every session, and once what a file names."""
    names = {"octavo-core": "packages/core", "octavo-native": "native"}
    wheel = tmp_path / "native.whl"
    local = _run(
        "local", Path=Path, ROOT=ROOT, DIRECTORIES=names, NATIVE="octavo-native", native_wheel=lambda *_: (wheel, None)
    )
    session = SimpleNamespace(virtualenv=SimpleNamespace(location=str(tmp_path)))
    option, listed, *others = local(session, list(names))
    assert (option, others) == ("-r", [str(wheel)])
    assert Path(listed).read_text() == f"-e {ROOT / 'packages/core'}\n"


LATE = """
import os

remove = os.rmdir

def rmdir(path, **options):
    if "garbage-" in str(path):
        raise OSError(39, "Directory not empty", path)
    remove(path, **options)

os.rmdir = rmdir

def test_has_a_folder(tmp_path):
    pass
"""


def test_sessions_beside_each_other_may_delete_the_same_old_folders(tmp_path: Path) -> None:
    """pytest deletes what earlier runs left. A session lost against another one, and failed with every test passed."""
    old = tmp_path / f"pytest-of-{getpass.getuser()}" / "garbage-of-an-earlier-run"
    old.mkdir(parents=True, mode=0o700)
    old.parent.chmod(0o700)
    (tmp_path / "test_late.py").write_text(LATE)
    command = (sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider")
    environment = {**os.environ, "PYTEST_DEBUG_TEMPROOT": str(tmp_path), "PYTEST_ADDOPTS": ""}
    run = subprocess.run(
        (*command, str(tmp_path / "test_late.py")), env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert list(old.parent.glob("garbage-*")), "pytest deleted the folder, so this test shows nothing"
