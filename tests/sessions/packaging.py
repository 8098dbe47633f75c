"""Wheels: how they are built, and the session that installs them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import nox

from sessions.distributions import DIRECTORIES, NATIVE, closure, outside
from sessions.native_wheel import Kernels, native_wheel


def build(session: nox.Session, dist: Path, *directories: str, kernels: Kernels = "optimized") -> None:
    """Build a wheel from each of these folders into `dist`; needs uv in the session's environment."""
    for directory in directories:
        if directory == DIRECTORIES[NATIVE]:
            dist.mkdir(parents=True, exist_ok=True)
            shutil.copy(native_wheel(session, kernels)[0], dist)
        else:
            session.run("uv", "build", "--wheel", "--out-dir", str(dist), directory, silent=True)


@nox.session(default=False)
def wheels(session: nox.Session) -> None:
    """Build every package into dist/, then install one plugin from there alone into an empty environment.

    Installing finds no compiler and takes no sources. The one wheel of octavo-native keeps to the stable ABI, and every
    other Python that is found here must import it, too.
    """
    shutil.rmtree("dist", ignore_errors=True)
    session.install("uv", "virtualenv", "abi3audit")
    build(session, Path("dist"), *DIRECTORIES.values())
    session.run("abi3audit", "--strict", *map(str, Path("dist").glob("octavo_native-*.whl")))
    plugin = session.posargs[0] if session.posargs else "octavo-torch-native"
    python, pip = empty_environment(session, sys.executable)
    session.run(*pip, "-c", "constraints.txt", *outside(closure([plugin])), external=True)
    no_compiler = {"PATH": str(Path(python).parent), "CC": "false", "CXX": "false"}
    session.run(*pip, "--no-index", "--find-links", "dist", plugin, external=True, env=no_compiler)
    session.run(python, "-m", "octavo_registry", "doctor", external=True)
    for version in ("3.11", "3.12", "3.13"):
        if version == "{}.{}".format(*sys.version_info):
            continue
        found = interpreter_of(version)
        if found is None:
            session.log(f"python{version} is not here: its import of octavo-native is not tried")
            continue
        python, pip = empty_environment(session, found)
        session.run(*pip, *outside([NATIVE]), external=True)
        session.run(*pip, "--no-index", "--find-links", "dist", NATIVE, external=True)
        session.run(python, "-c", "import octavo_native; print(octavo_native.build_info())", external=True)


def interpreter_of(version: str) -> str | None:
    """Python of that version, if there is one: a version manager's shim on PATH may stand for none."""
    found = shutil.which(f"python{version}")
    if found is None:
        return None
    asked = "import sys; print('{}.{}'.format(*sys.version_info))"
    try:
        run = subprocess.run([found, "-c", asked], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return found if run.returncode == 0 and run.stdout.strip() == version else None


def empty_environment(session: nox.Session, interpreter: str) -> tuple[str, tuple[str, ...]]:
    """Python of a new environment and its pip command that installs wheels; needs virtualenv in the session's."""
    folder = Path(session.create_tmp()).resolve() / Path(interpreter).name
    shutil.rmtree(folder, ignore_errors=True)
    session.run("virtualenv", "--python", interpreter, str(folder), silent=True)
    python = str(folder / ("Scripts" if sys.platform == "win32" else "bin") / "python")
    return python, (python, "-m", "pip", "install", "--quiet", "--only-binary", ":all:")
