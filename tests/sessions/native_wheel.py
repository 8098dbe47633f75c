"""The one wheel of octavo-native, which all sessions of a run install."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Literal

import nox
from workspace import ROOT

from sessions.distributions import DIRECTORIES, NATIVE

sys.path.insert(0, str(ROOT / "native" / "tools"))
from ptxas_report import is_of_these_sources

Kernels = Literal["optimized", "quick", "none"]
"""CUDA kernels: as they are shipped; PTX without optimization, in a tenth of the time; none."""


def nvcc() -> str | None:
    """The CUDA compiler of this machine, if there is one."""
    return os.environ.get("CUDACXX") or shutil.which("nvcc")


@cache
def _version_text(compiler: str) -> str:
    """What `compiler --version` prints."""
    return subprocess.run([compiler, "--version"], capture_output=True, check=True, text=True).stdout


def _native_sources() -> list[Path]:
    """Every file that the wheel of octavo-native is made from, tracked or not: CMake compiles what lies there."""
    native = ROOT / DIRECTORIES[NATIVE]
    files = [native / name for name in ("pyproject.toml", "CMakeLists.txt", "README.md")]
    files += [path for part in ("cmake", "include", "lib", "src") for path in (native / part).rglob("*")]
    return sorted(path for path in files if path.is_file() and path.suffix not in (".pyc", ".so"))


def kernels_of_tests() -> Kernels:
    """How to compile the CUDA kernels that test sessions install.

    "quick" where no GPU could run the kernels and native/tools/kernels.md already holds what this nvcc's ptxas made of
    these very sources: then whether they still compile is all that a test can find out.
    """
    compiler = nvcc()
    if compiler is None:
        return "none"
    if shutil.which("nvidia-smi") or Path("/dev/nvidiactl").exists():
        return "optimized"
    version = re.search(r"V(\d+\.\d+\.\d+)", _version_text(compiler))
    return "quick" if version and is_of_these_sources(version[1]) else "optimized"


def native_wheel(session: nox.Session, kernels: Kernels | None = None) -> tuple[Path, Path]:
    """The wheel of octavo-native and the log of its build.

    It is built once for all sessions, and again when a source changes: optimizing the CUDA kernels takes minutes, and
    one wheel serves every Python from 3.11 on.

    kernels   None: as `kernels_of_tests` says; without nvcc always "none"
    """
    kernels = "none" if nvcc() is None else kernels or kernels_of_tests()
    compiler = nvcc() if kernels != "none" else None
    version = _version_text(compiler) if compiler else ""
    digest = hashlib.sha256(f"{version}{platform.platform()}".encode())
    for path in _native_sources():
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    folder = session.cache_dir.resolve() / f"native-{kernels}" / digest.hexdigest()[:16]
    log = folder / "build.log"
    if not list(folder.glob("*.whl")):
        shutil.rmtree(folder.parent, ignore_errors=True)
        folder.mkdir(parents=True)
        values = {
            "OCTAVO_CUDA": "ON" if compiler else "OFF",
            "OCTAVO_CUDA_OPTIMIZE": "OFF" if kernels == "quick" else "ON",
        }
        settings = [part for name, value in values.items() for part in ("-C", f"cmake.define.{name}={value}")]
        if session.venv_backend == "uv":
            build = ("uv", "build", "--python", sys.executable, "--wheel", *settings, "--out-dir", str(folder))
        else:
            build = ("python", "-m", "pip", "wheel", "-v", "--no-deps", *settings, "--wheel-dir", str(folder))
        session.log(f"octavo-native: compiling, CUDA kernels: {kernels}; output in {log}")
        with log.open("w") as output:
            source = str(ROOT / DIRECTORIES[NATIVE])
            session.run(*build, source, stdout=output, stderr=subprocess.STDOUT, success_codes=range(256))
        if not list(folder.glob("*.whl")):
            session.error("octavo-native does not build:\n" + log.read_text(errors="replace")[-8000:])
    (wheel,) = folder.glob("*.whl")
    return wheel, log
