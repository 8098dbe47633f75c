"""Environments of nox sessions: what is installed, the one wheel of octavo-native, and how pytest runs."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path
from typing import Any, Literal

import nox
from nox.project import dependency_groups, load_toml
from workspace import ROOT

from sessions.xla import Effort, xla_settings

sys.path.insert(0, str(ROOT / "native" / "tools"))
from ptxas_report import is_of_these_sources

CORES = os.cpu_count() or 1
WORKERS = "PYTEST_XDIST_AUTO_NUM_WORKERS"
DIRECTORIES = {
    "octavo-core": "packages/core",
    "octavo-numerics": "packages/numerics",
    "octavo-registry": "registry",
    "octavo-torch": "packages/torch",
    "octavo-jax": "packages/jax",
    "octavo-native": "native",
    "octavo-torch-native": "packages/torch-native",
    "octavo-torch-cudagraph": "packages/torch-cudagraph",
    "octavo-triton": "packages/triton",
    "octavo-torch-triton": "packages/torch-triton",
    "octavo-jax-native": "packages/jax-native",
    "octavo-jax-triton": "packages/jax-triton",
    "octavo-conformance": "packages/conformance",
    "octavo-bench": "packages/bench",
    "octavo": "packages/cli",
}
NATIVE = "octavo-native"
Kernels = Literal["optimized", "quick", "none"]
"""CUDA kernels: as they are shipped; PTX without optimization, in a tenth of the time; none."""
_COMPILE_MUCH = ("octavo-jax", "octavo-jax-native", "octavo-jax-triton", "octavo-bench", "octavo")

# uv reads no pip settings; an index mirror or a folder of wheels that pip was told of serves both.
if "PIP_FIND_LINKS" in os.environ:
    os.environ.setdefault("UV_FIND_LINKS", os.environ["PIP_FIND_LINKS"])
if "PIP_INDEX_URL" in os.environ:
    os.environ.setdefault("UV_DEFAULT_INDEX", os.environ["PIP_INDEX_URL"])
os.environ.setdefault("UV_PYTHON_DOWNLOADS", "never")
# Sessions start hundreds of processes. Without .pyc files each compiles torch and JAX anew: 3 and 2 seconds each time.
os.environ["PYTHONDONTWRITEBYTECODE"] = ""


def project(distribution: str) -> dict[str, Any]:
    return dict(load_toml(ROOT / DIRECTORIES[distribution] / "pyproject.toml")["project"])


def ours(requirements: list[str]) -> list[str]:
    names = (re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0] for requirement in requirements)
    return [name for name in names if name in DIRECTORIES]


def closure(distributions: list[str]) -> list[str]:
    """These distributions of the workspace and every one that they need, so that none is sought on an index."""
    found: dict[str, None] = {}
    queue = list(distributions)
    while queue:
        name = queue.pop()
        if name not in found:
            found[name] = None
            queue += ours(project(name).get("dependencies", []))
    return list(found)


def local(session: nox.Session, distributions: list[str], kernels: Kernels | None = None) -> list[str]:
    """Arguments that install these packages from here: editable, and octavo-native as its one wheel."""
    pure = [name for name in distributions if name != NATIVE]
    editable = [part for name in pure for part in ("-e", str(ROOT / DIRECTORIES[name]))]
    return editable if NATIVE not in distributions else [*editable, str(native_wheel(session, kernels)[0])]


def install(session: nox.Session, *distributions: str, extra: tuple[str, ...] = ()) -> None:
    """Install workspace packages in one command: in two, the second half is sought on an index."""
    workspace = closure([*distributions, *ours(list(extra))])
    theirs = [requirement for requirement in extra if not ours([requirement])]
    session.install("-c", str(ROOT / "constraints.txt"), *local(session, workspace), *theirs)


def nvcc() -> str | None:
    return os.environ.get("CUDACXX") or shutil.which("nvcc")


@cache
def _said_of_itself(compiler: str) -> str:
    """What `compiler --version` prints."""
    return subprocess.run([compiler, "--version"], capture_output=True, check=True, text=True).stdout


def _native_sources() -> list[Path]:
    """Every file that the wheel of octavo-native is made from, tracked or not: CMake compiles what lies there."""
    native = ROOT / DIRECTORIES[NATIVE]
    files = [native / name for name in ("pyproject.toml", "CMakeLists.txt", "README.md")]
    files += [path for part in ("cmake", "include", "lib", "src") for path in (native / part).rglob("*")]
    return sorted(path for path in files if path.is_file() and path.suffix not in (".pyc", ".so"))


def kernels_of_tests() -> Kernels:
    """How the CUDA kernels are compiled that sessions install.

    Where there is no GPU that could run them, and native/tools/kernels.md says what this nvcc's ptxas made of these
    very sources, that they compile is all that is left to try.
    """
    compiler = nvcc()
    if compiler is None:
        return "none"
    if shutil.which("nvidia-smi") or Path("/dev/nvidiactl").exists():
        return "optimized"
    version = re.search(r"V(\d+\.\d+\.\d+)", _said_of_itself(compiler))
    return "quick" if version and is_of_these_sources(version[1]) else "optimized"


def native_wheel(session: nox.Session, kernels: Kernels | None = None) -> tuple[Path, Path]:
    """The wheel of octavo-native and the log of its build, made once for all sessions and again when a source changes.

    Optimizing the CUDA kernels takes minutes, and one artifact serves every Python from 3.11 on.

    kernels   without nvcc there are none; None is `kernels_of_tests()`
    """
    kernels = "none" if nvcc() is None else kernels or kernels_of_tests()
    compiler = nvcc() if kernels != "none" else None
    version = _said_of_itself(compiler) if compiler else ""
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


def effort_of(package: str) -> Effort:
    """How programs of JAX are compiled in a package's own tests."""
    return "in a hurry" if package in _COMPILE_MUCH else "as users have it"


def run_pytest(
    session: nox.Session, *arguments: str, xla: Effort = "as users have it", python: str | None = None
) -> None:
    """pytest with one worker per core; what XLA compiles is kept where the same is compiled again.

    Work is divided by module, so that a module's fixture (a whole training run) is set up once and not once per worker.
    JAX has eight devices everywhere: tests of sharding need them, and a program compiled for another number of devices
    is another program. PYTEST_XDIST_AUTO_NUM_WORKERS sets another number of workers; one is this process itself.

    xla      how it compiles
    python   the interpreter of another environment; None is the session's own
    """
    count = int(os.environ.get(WORKERS) or min(CORES, 8))
    workers = str(count if count > 1 else 0)
    settings = settings_of_tests(session, xla, keep_programs=count > 1 or xla != "in a hurry")
    if python is None:
        settings |= share_bytecode(session)
    pytest = ("pytest",) if python is None else (python, "-m", "pytest")
    options = ("-n", workers, "--dist", "loadscope")
    session.run(*pytest, *options, *arguments, env=settings, external=python is not None)


def settings_of_tests(session: nox.Session, xla: Effort, keep_programs: bool = True) -> dict[str, str]:
    """Environment variables of a test run, see `run_pytest`.

    keep_programs   that XLA has compiled, for other workers and runs, and for the conformance suite, which compiles
                    many of them twice. One worker with a package's own tests compiles hardly one twice, and writing
                    them down takes a tenth of its time
    """
    settings = {"OMP_NUM_THREADS": "1"}  # beside workers, torch's threads only wait for each other
    # g++ compiles one or two kernels of torch's inductor, and need neither try instruction sets nor precompile headers
    settings |= {"TORCHINDUCTOR_VEC_ISA_OK": "1", "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}
    if keep_programs:
        settings["JAX_COMPILATION_CACHE_DIR"] = str(session.cache_dir.resolve() / "xla")
        settings["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    flags = (os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8")
    return settings | xla_settings(xla, *flags)


def share_bytecode(session: nox.Session) -> dict[str, str]:
    """The variable by which this session's Python keeps .pyc files where those of all sessions are.

    Python files them by the path of the source, so the path of this session's packages is a link there. uv's
    environments are hard links of the same files, whose time and size Python compares before it takes a .pyc: where
    another session has another version of a package, or a copy of it, Python compiles its own.
    """
    store = session.cache_dir.resolve() / "bytecode"
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(session.virtualenv.location)})).resolve()
    link = store / packages.relative_to(packages.anchor)
    (store / "packages").mkdir(parents=True, exist_ok=True)
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.is_symlink():
        link.symlink_to(store / "packages", target_is_directory=True)
    return {"PYTHONPYCACHEPREFIX": str(store)}


def needed_by_tests(distribution: str) -> tuple[str, ...]:
    pyproject = load_toml(ROOT / DIRECTORIES[distribution] / "pyproject.toml")
    return tuple(dependency_groups(pyproject, "test"))


def outside(distributions: list[str]) -> list[str]:
    """What these packages of the workspace require of others."""
    required = [requirement for name in distributions for requirement in project(name).get("dependencies", [])]
    return [requirement for requirement in required if not ours([requirement])]
