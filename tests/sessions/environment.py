"""Environments of nox sessions: what is installed into them, and how pytest runs there."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import nox
from workspace import ROOT

from sessions.distributions import DIRECTORIES, NATIVE, closure, ours
from sessions.native_wheel import Kernels, native_wheel
from sessions.xla import Effort, xla_settings

CORES = os.cpu_count() or 1
WORKERS = "PYTEST_XDIST_AUTO_NUM_WORKERS"
_COMPILE_MUCH = ("octavo-jax", "octavo-jax-native", "octavo-jax-triton", "octavo-bench", "octavo")

# uv reads no pip settings; an index mirror or a folder of wheels that pip was told of serves both.
if "PIP_FIND_LINKS" in os.environ:
    os.environ.setdefault("UV_FIND_LINKS", os.environ["PIP_FIND_LINKS"])
if "PIP_INDEX_URL" in os.environ:
    os.environ.setdefault("UV_DEFAULT_INDEX", os.environ["PIP_INDEX_URL"])
os.environ.setdefault("UV_PYTHON_DOWNLOADS", "never")
# Sessions start hundreds of processes. Without .pyc files each compiles torch and JAX anew: 3 and 2 seconds each time.
os.environ["PYTHONDONTWRITEBYTECODE"] = ""


def local(session: nox.Session, distributions: list[str], kernels: Kernels | None = None) -> list[str]:
    """Arguments that install these packages from here: editable, and octavo-native as its one wheel.

    The editable ones stand in a file of requirements: uv builds what its command line names anew in each session, half
    a second for a package, and once for all sessions what a file names.
    """
    pure = [name for name in distributions if name != NATIVE]
    listed = Path(str(session.virtualenv.location), "from-here.txt")
    listed.write_text("".join(f"-e {ROOT / DIRECTORIES[name]}\n" for name in pure))
    arguments = ["-r", str(listed)]
    return arguments if NATIVE not in distributions else [*arguments, str(native_wheel(session, kernels)[0])]


def install(session: nox.Session, *distributions: str, extra: tuple[str, ...] = ()) -> None:
    """Install workspace packages in one command: in two, the second half is sought on an index."""
    workspace = closure([*distributions, *ours(list(extra))])
    theirs = [requirement for requirement in extra if not ours([requirement])]
    session.install("-c", str(ROOT / "constraints.txt"), *local(session, workspace), *theirs)


def effort_of(package: str) -> Effort:
    """How programs of JAX are compiled in a package's own tests."""
    return "in a hurry" if package in _COMPILE_MUCH else "as users have it"


def run_pytest(
    session: nox.Session,
    *arguments: str,
    xla: Effort = "as users have it",
    compiles_twice: bool = False,
    python: str | None = None,
) -> None:
    """pytest with one worker per core; what XLA compiles is kept where the same is compiled again.

    Work is divided by module, so that a module's fixture (a whole training run) is set up once and not once per worker.
    JAX has eight devices everywhere: tests of sharding need them, and a program compiled for another number of devices
    is another program. PYTEST_XDIST_AUTO_NUM_WORKERS sets another number of workers; one is this process itself.

    xla             how it compiles
    compiles_twice  many of its programs, which one worker keeps, too
    python          the interpreter of another environment; None is the session's own
    """
    count = int(os.environ.get(WORKERS) or min(CORES, 8))
    workers = str(count if count > 1 else 0)
    settings = settings_of_tests(session, xla, keep_programs=compiles_twice or count > 1 or xla != "in a hurry")
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
