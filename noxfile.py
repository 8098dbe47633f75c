"""Every development task. `nox` runs the checks of a change, `nox -s demo` the main job, `nox -l` lists the rest."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import nox
from nox.project import dependency_groups, load_toml

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "uv|venv"
nox.options.error_on_missing_interpreters = True

ROOT = Path(__file__).parent
DIRECTORIES = {
    "octavo-core": "packages/core",
    "octavo-numerics": "packages/numerics",
    "octavo-registry": "registry",
    "octavo-torch": "packages/torch",
    "octavo-jax": "packages/jax",
    "octavo-conformance": "packages/conformance",
    "octavo": "packages/cli",
}
TEMPLATE = "docs/examples/acme-octavo"
BACKENDS = {"torch-reference": "octavo-torch", "jax-reference": "octavo-jax"}
SLOW = ["octavo-numerics", "octavo"]  # packages with tests that take minutes
TOOLS = ("ruff==0.17.5", "mypy==2.4.1")

# uv reads no pip settings; an index mirror or a folder of wheels that pip was told of serves both.
if "PIP_FIND_LINKS" in os.environ:
    os.environ.setdefault("UV_FIND_LINKS", os.environ["PIP_FIND_LINKS"])
if "PIP_INDEX_URL" in os.environ:
    os.environ.setdefault("UV_DEFAULT_INDEX", os.environ["PIP_INDEX_URL"])
os.environ.setdefault("UV_PYTHON_DOWNLOADS", "never")


def _project(distribution: str) -> dict[str, Any]:
    return dict(load_toml(ROOT / DIRECTORIES[distribution] / "pyproject.toml")["project"])


def _ours(requirements: list[str]) -> list[str]:
    names = (re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0] for requirement in requirements)
    return [name for name in names if name in DIRECTORIES]


def _closure(distributions: list[str]) -> list[str]:
    """These distributions of the workspace and every one that they need, so that none is sought on an index."""
    found: dict[str, None] = {}
    queue = list(distributions)
    while queue:
        name = queue.pop()
        if name not in found:
            found[name] = None
            queue += _ours(_project(name).get("dependencies", []))
    return list(found)


def _install(session: nox.Session, *distributions: str, extra: tuple[str, ...] = ()) -> None:
    """Install workspace packages, editable, in one command: in two, the second half is sought on an index."""
    workspace = _closure([*distributions, *_ours(list(extra))])
    editable = [part for name in workspace for part in ("-e", str(ROOT / DIRECTORIES[name]))]
    outside = [requirement for requirement in extra if not _ours([requirement])]
    session.install("-c", str(ROOT / "constraints.txt"), *editable, *outside)


def _pytest(session: nox.Session, *arguments: str) -> None:
    """pytest with a worker a core; what XLA compiles is kept, because compiling is most of the JAX tests' time.

    Work is dealt by module: a module's fixture (a whole training run) is made once, and not once a worker.
    """
    workers = str(min(os.cpu_count() or 1, 8))
    settings = {
        "OMP_NUM_THREADS": "1",  # beside workers, torch's threads only wait for each other
        "JAX_COMPILATION_CACHE_DIR": str(session.cache_dir.resolve() / "xla"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    session.run("pytest", "-n", workers, "--dist", "loadscope", *arguments, *session.posargs, env=settings)


def _test_group(distribution: str) -> tuple[str, ...]:
    pyproject = load_toml(ROOT / DIRECTORIES[distribution] / "pyproject.toml")
    return tuple(dependency_groups(pyproject, "test"))


@nox.session
def lint(session: nox.Session) -> None:
    """Format and lint."""
    session.install(*TOOLS[:1])
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """mypy --strict over every package and the plugin template."""
    _install(session, *DIRECTORIES, extra=(*TOOLS[1:], "flax"))
    session.run("mypy", *(str(Path(directory, "src")) for directory in (*DIRECTORIES.values(), TEMPLATE)))


@nox.session
@nox.parametrize("package", list(DIRECTORIES), ids=list(DIRECTORIES))
def tests(session: nox.Session, package: str) -> None:
    """One package's tests, with its declared dependencies alone."""
    _install(session, package, extra=(*_test_group(package), "pytest-xdist"))
    _pytest(session, DIRECTORIES[package])


@nox.session
@nox.parametrize("backend", list(BACKENDS), ids=list(BACKENDS))
def conformance(session: nox.Session, backend: str) -> None:
    """The conformance suite on one reference backend."""
    _install(session, BACKENDS[backend], "octavo-conformance", extra=("pytest-xdist",))
    Path("reports").mkdir(exist_ok=True)
    suite = ("--pyargs", "octavo_conformance.suite", "--octavo-backend", backend)
    _pytest(session, *suite, f"--octavo-report=reports/{backend}.json")


@nox.session
def integration(session: nox.Session) -> None:
    """What needs several packages: the arrows, both frameworks' bits, the README's code."""
    _install(session, *DIRECTORIES, extra=("pytest", "pytest-xdist", "sybil", "flax", "-e", TEMPLATE))
    _pytest(session, "--dist", "load", "tests")  # no costly fixtures, one long module


@nox.session
def third_party(session: nox.Session) -> None:
    """A plugin made from the template, out of the tree, installed from wheels with all it needs, through the suite."""
    folder = Path(session.create_tmp()).resolve()
    shutil.rmtree(folder, ignore_errors=True)
    ours = _closure(["octavo", "octavo-torch", "octavo-conformance"])
    session.install("build[uv]")
    _build(session, folder / "dist", *(DIRECTORIES[name] for name in ours))
    session.install("-c", "constraints.txt", *map(str, sorted((folder / "dist").glob("*.whl"))))
    with session.chdir(folder):
        session.run("octavo", "new", "zenith")
        _build(session, folder / "plugin", "zenith-octavo")
        session.install(*map(str, (folder / "plugin").glob("*.whl")))
        session.run("octavo", "conform", "zenith", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation; a warning is an error."""
    _install(session, *DIRECTORIES, extra=("sphinx>=8", "myst-parser>=4", "furo", "sphinx-copybutton", "flax"))
    session.run("sphinx-build", "-W", "--keep-going", "-b", "html", "docs", "docs/_build/html", *session.posargs)


@nox.session(default=False)
def demo(session: nox.Session) -> None:
    """The main job: train a small mixture-of-experts model in four recipes and write demo-output/."""
    _install(session, "octavo", "octavo-torch", "octavo-jax")
    session.run("octavo", "train", *session.posargs)


@nox.session(default=False)
@nox.parametrize("package", SLOW, ids=SLOW)
def slow(session: nox.Session, package: str) -> None:
    """Everything that takes minutes: exhaustive casts, training gates, whole tables."""
    _install(session, package, extra=_test_group(package))
    session.run("pytest", DIRECTORIES[package], "--slow", "-m", "slow", *session.posargs)


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Every benchmark file; numbers are reported, not judged."""
    _install(session, *DIRECTORIES, extra=("pytest", "pytest-benchmark"))
    files = [str(path) for name in DIRECTORIES.values() for path in sorted(Path(name).glob("benchmarks/bench_*.py"))]
    session.run("pytest", "--benchmark-only", "-o", "python_files=bench_*.py", *files, *session.posargs)


@nox.session(default=False)
@nox.parametrize("package", list(DIRECTORIES), ids=list(DIRECTORIES))
def minimums(session: nox.Session, package: str) -> None:
    """One package's tests with the oldest direct dependencies that it declares (needs uv)."""
    workspace = _closure([package, *_ours(list(_test_group(package)))])
    editable = [part for name in workspace for part in ("-e", str(ROOT / DIRECTORIES[name]))]
    outside = [requirement for requirement in _test_group(package) if not _ours([requirement])]
    session.install("--resolution", "lowest-direct", *editable, *outside)
    session.run("pytest", DIRECTORIES[package], *session.posargs)


def _build(session: nox.Session, dist: Path, *directories: str) -> None:
    for directory in directories:
        session.run("pyproject-build", "--installer", "uv", "--wheel", "--outdir", str(dist), directory, silent=True)


@nox.session(default=False)
def wheels(session: nox.Session) -> None:
    """Build every package into dist/, then install one plugin from there alone into an empty environment."""
    shutil.rmtree("dist", ignore_errors=True)
    session.install("build[uv]", "virtualenv")
    _build(session, Path("dist"), *DIRECTORIES.values())
    plugin = session.posargs[0] if session.posargs else "octavo-torch"
    environment = Path(session.create_tmp()).resolve() / "empty"
    shutil.rmtree(environment, ignore_errors=True)
    session.run("virtualenv", str(environment), silent=True)
    python = str(environment / ("Scripts" if sys.platform == "win32" else "bin") / "python")
    ours = _closure([plugin])
    outside = [
        requirement
        for name in ours
        for requirement in _project(name).get("dependencies", [])
        if not _ours([requirement])
    ]
    pip = (python, "-m", "pip", "install", "--quiet")
    session.run(*pip, "-c", "constraints.txt", *outside, external=True)
    session.run(*pip, "--no-index", "--find-links", "dist", plugin, external=True)
    session.run(python, "-m", "octavo_registry", "doctor", external=True)


@nox.session(default=False, venv_backend="none")
def gpu(session: nox.Session) -> None:
    """The conformance suite on a CUDA device, in the environment that runs nox: drivers and frameworks are its own."""
    suite = (sys.executable, "-m", "pytest", "--pyargs", "octavo_conformance.suite", "-k", "cuda")
    for backend in session.posargs or BACKENDS:
        session.run(*suite, "--octavo-backend", backend)
