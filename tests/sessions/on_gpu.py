"""The session for a machine with a CUDA device: its own drivers and frameworks, in the environment that runs nox."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata

import nox
from nox.command import CommandFailed
from packaging.requirements import Requirement
from workspace import ROOT

from sessions.backends import BACKENDS, INTERPRETED
from sessions.distributions import DIRECTORIES, needed_by_tests

SANITIZERS = {  # tool of compute-sanitizer: arguments of native/tests/sanitize.py
    "memcheck": (),
    "racecheck": (),
    "initcheck": ("--tail", "unwritten"),  # rows past the sum have no value, so whoever reads them is seen
    "synccheck": (),
}


@nox.session(default=False, venv_backend="none")
def gpu(session: nox.Session) -> None:
    """What needs a CUDA device, in the environment that runs nox: drivers and frameworks are its own.

    The kernels' tests, CUDA tests of octavo-torch and of the native plugins, all tests of octavo-jax and of the plugins
    in Triton, the conformance suite on every installed backend, then the tools of compute-sanitizer over every kernel,
    all at a time, where it is on PATH. A part that fails does not keep the others from running. Positional arguments
    choose backends.
    """
    # a file of CUDA tests alone has it in its name, a test of both devices in its parameters
    of_cuda = ("native", "packages/torch", "packages/torch-native", "packages/torch-cudagraph", "packages/jax-native")
    parts = {f"{directory}/tests": _pytest_on_gpu(f"{directory}/tests", "-k", "cuda") for directory in of_cuda}
    # modules share nothing, and a few of them take most of the time
    parts["native/tests"] = _pytest_on_gpu("native/tests", "-k", "cuda", dist="worksteal")
    # whose device is the GPU where there is one
    for name in filter(_is_installed, ("octavo-jax", "octavo-torch-triton", "octavo-jax-triton")):
        needed = [Requirement(line).name for line in needed_by_tests(name)]
        lacking = [distribution for distribution in needed if not _is_installed(distribution)]
        if lacking:
            session.warn(f"the tests of {name} do not run: {', '.join(lacking)} not installed")
        else:
            parts[f"{DIRECTORIES[name]}/tests"] = _pytest_on_gpu(f"{DIRECTORIES[name]}/tests")
    here = [name for name, owner in BACKENDS.items() if _is_installed(owner) and name not in INTERPRETED]
    suite = ("--pyargs", "octavo_conformance.suite", "-k", "cuda", "--octavo-backend")
    parts |= {f"conformance({backend})": _pytest_on_gpu(*suite, backend) for backend in session.posargs or here}
    everything = (sys.executable, "native/tests/sanitize.py")
    parts["sanitize.py"] = everything
    # else one process with XLA takes the memory of all, and each with torch starts a thread on every core
    shared = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "OMP_NUM_THREADS": "1"}
    failed = []
    for name, command in parts.items():
        try:
            session.run(*command, env=shared, external=True)
        except CommandFailed:
            failed.append(name)
    if shutil.which("compute-sanitizer") is None:
        session.warn("compute-sanitizer is not on PATH, so its four tools do not run; it comes with the CUDA toolkit")
    else:
        failed += _sanitize(session, everything, shared)
    if failed:
        session.error(f"failed: {', '.join(failed)}")


def _sanitize(session: nox.Session, everything: tuple[str, ...], env: dict[str, str]) -> list[str]:
    """The tools of compute-sanitizer that found something, each in a process of its own beside the others."""

    def run(tool: str) -> tuple[str, int]:
        watch = ("compute-sanitizer", "--tool", tool, "--error-exitcode", "3", "--print-limit", "20")
        command = (*watch, *everything, *SANITIZERS[tool])
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        session.log(f"{' '.join(command)}\n{done.stdout}")
        return tool, done.returncode

    with ThreadPoolExecutor(len(SANITIZERS)) as pool:
        return [tool for tool, code in pool.map(run, SANITIZERS) if code]


def _pytest_on_gpu(*arguments: str, dist: str = "loadscope") -> tuple[str, ...]:
    """pytest with processes on three quarters of the cores where pytest-xdist is installed, for most of a test's time
    is its host's.

    What frameworks of the environment warn of is told and no failure: their versions are not ours.
    """
    processes = str(max(2, (os.cpu_count() or 1) * 3 // 4))
    spread = ("-n", processes, "--dist", dist, "-p", "no:benchmark") if _is_installed("pytest-xdist") else ()
    theirs = ("-W", "default::UserWarning", "-W", "default::DeprecationWarning", "-W", "default::FutureWarning")
    return (sys.executable, "-m", "pytest", *spread, *theirs, *arguments)


def _is_installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True
