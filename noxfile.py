"""Every development task. `nox` runs the checks of a change, `nox -s demo` the main job, `nox -l` lists the rest."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import nox

sys.path.insert(0, str(Path(__file__).parent / "tests"))
from sessions.backends import BACKENDS, INTERPRETED, ON_CUDA
from sessions.change import change  # noqa: F401  # nox finds sessions by their decorator
from sessions.distributions import DIRECTORIES, NATIVE, closure, needed_by_tests
from sessions.environment import effort_of, install, run_pytest, settings_of_tests, share_bytecode
from sessions.minimums import minimums  # noqa: F401
from sessions.native_wheel import Kernels, kernels_of_tests, native_wheel, nvcc
from sessions.newest import newest  # noqa: F401
from sessions.on_gpu import gpu  # noqa: F401
from sessions.packaging import build, wheels  # noqa: F401
from sessions.releasing import release  # noqa: F401
from sessions.xla import Effort
from workspace import ROOT, tracked

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "uv|venv"
nox.options.error_on_missing_interpreters = True
nox.options.sessions = ["change"]

TEMPLATE = "docs/examples/acme-octavo"
TEMPLATES = (TEMPLATE, "docs/examples/acme-octavo-jax")
# In Triton's interpreter a tile takes milliseconds, so of what calls most a few cases are tried; -k "" tries all.
SMALL_CASES = (
    "(test_bits[ and not (stochastic and hadamard)) or (test_product_is_within and not current and not delayed)"
    " or test_wgrad_accumulates or test_weights_that_lie or test_permute_rows or test_combine_rows or test_dot_rows"
    " or card"
)
SLOW = [
    "octavo-numerics",
    "octavo-jax",
    "octavo-bench",
    "octavo-torch-triton",
    "octavo-jax-triton",
    "octavo",
]  # packages with tests that take minutes
TOOLS = ("ruff==0.17.5", "clang-format==23.1.5", "mypy==2.4.1")
ADAPTED = (
    "qwix==0.1.8",
    "tokamax==0.0.12",
    "transformers==5.23.0",
    "compressed-tensors==0.20.0",
    "peft==0.21.2",
    "accelerate",  # with which transformers reads FP8 checkpoints
    "spmd_types==0.2.3",
    "einops",
    "tyro",
    "pyyaml",
    "triton",
)
# Their requirements are whole training stacks, of which what is adapted imports those above.
ADAPTED_ALONE = ("torchtitan==0.3.0", "megatron-core==0.16.1", "nemo-automodel==0.7.0")


@nox.session
def lint(session: nox.Session) -> None:
    """Format and lint: Python everywhere, C++ and CUDA in lib and include of native/."""
    session.install(*TOOLS[:2])
    python = (path.relative_to(ROOT) for path in tracked("**/*.py", "**/*.pyi"))
    places = sorted({path.parts[0] for path in python})  # folders: new files are linted, too
    session.run("ruff", "format", "--check", *places)
    session.run("ruff", "check", *places)
    kinds = ("h", "cpp", "cu", "cuh")
    sources = tracked(*(f"native/{folder}/**/*.{kind}" for folder in ("lib", "include") for kind in kinds))
    session.run("clang-format", "--dry-run", "-Werror", *map(str, sources))


@nox.session
def native(session: nox.Session) -> None:
    """Compile octavo-native, which every other session then installs.

    Kernels that have changed since native/tools/kernels.md was written are optimized, and what ptxas says of them is a
    gate; others become PTX without optimization, which takes a tenth of the time.
    """
    _judge(session, kernels_of_tests())


@nox.session(default=False)
def kernels(session: nox.Session) -> None:
    """Compile octavo-native as it is shipped, and hold what ptxas says of every kernel to native/tools/kernels.md."""
    if nvcc() is None:
        session.error("there is no nvcc (PATH or CUDACXX), so no kernel can be compiled; install CUDA 12.8 or newer")
    _judge(session, "optimized")


def _judge(session: nox.Session, kernels: Kernels) -> None:
    wheel, log = native_wheel(session, kernels)
    session.log(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB; CUDA kernels: {kernels}")
    if kernels == "none":
        session.skip("there is no nvcc (PATH or CUDACXX): kernels are built for the CPU alone, and ptxas says nothing")
    if kernels == "optimized":
        session.run("python", "native/tools/ptxas_report.py", str(log), "--check")


@nox.session
def types(session: nox.Session) -> None:
    """mypy --strict over every package, the plugin template, the tools, and functions that do not fit the contract."""
    install(session, *DIRECTORIES, extra=(*TOOLS[2:], "flax", "safetensors"))
    sources = (str(Path(directory, "src")) for directory in (*DIRECTORIES.values(), *TEMPLATES))
    session.run("mypy", *sources, "native/tools", "registry/tests/contract/wrong_signatures.py")


@nox.session
@nox.parametrize("package", list(DIRECTORIES), ids=list(DIRECTORIES))
def tests(session: nox.Session, package: str) -> None:
    """One package's tests, with its declared dependencies alone.

    Those that compile programs of JAX do so in a hurry. Bits as users have them are for conformance(jax-native) and
    tests/test_frameworks_agree.py.
    """
    install(session, package, extra=(*needed_by_tests(package), "pytest-xdist"))
    run_pytest(session, DIRECTORIES[package], *session.posargs, xla=effort_of(package))


@nox.session
@nox.parametrize("backend", list(BACKENDS), ids=list(BACKENDS))
def conformance(session: nox.Session, backend: str) -> None:
    """The conformance suite on one backend of ours, whose card declares all that works."""
    if backend in ON_CUDA and shutil.which("nvidia-smi") is None:
        session.skip(f"{backend} serves CUDA devices alone, and there is none here; nox -s gpu runs its suite")
    # octavo-jax-triton needs torch where Triton interprets its kernels, and nowhere else
    more = needed_by_tests(BACKENDS[backend]) if backend in INTERPRETED else ()
    install(session, BACKENDS[backend], "octavo-conformance", extra=("pytest-xdist", *more))
    Path("reports").mkdir(exist_ok=True)
    suite = ("--pyargs", "octavo_conformance.suite", "--octavo-backend", backend)
    if backend in INTERPRETED:
        session.env["TRITON_INTERPRET"] = "1"
        suite += ("-k", SMALL_CASES)
    undeclared = ("-W", "error::octavo_conformance.UndeclaredCapability")
    report = f"--octavo-report=reports/{backend}.json"
    # No user has the bits of an interpreter. Those of the reference in JAX, as LLVM and XLA's emitters make them, are
    # tests/test_frameworks_agree.py's to see: here most of the time was LLVM's.
    xla: Effort = "in a hurry" if backend in (*INTERPRETED, "jax-reference") else "as users have it"
    run_pytest(session, *suite, *undeclared, report, *session.posargs, xla=xla, compiles_twice=True)


@nox.session
def integration(session: nox.Session) -> None:
    """What needs several packages: the arrows, both frameworks' bits, the README's code."""
    install(
        session,
        *DIRECTORIES,
        extra=("pytest", "pytest-xdist", "sybil", "flax", "flatbuffers", "pyyaml", "safetensors", "-e", TEMPLATE),
    )
    run_pytest(session, "--dist", "load", "tests", *session.posargs)  # no costly fixtures, one long module


@nox.session
def third_party(session: nox.Session) -> None:
    """Plugins made from the templates, out of the tree, installed from wheels with all they need, through the suite."""
    folder = Path(session.create_tmp()).resolve()
    shutil.rmtree(folder, ignore_errors=True)
    session.install("uv")
    needed = closure(["octavo", "octavo-torch", "octavo-jax", "octavo-conformance"])
    build(session, folder / "dist", *(DIRECTORIES[name] for name in needed))
    session.install("-c", "constraints.txt", *map(str, sorted((folder / "dist").glob("*.whl"))))
    plugins = {"zenith": "torch", "nadir": "jax"}
    with session.chdir(folder):
        for name, framework in plugins.items():
            session.run("octavo", "new", name, "--framework", framework)
        build(session, folder / "plugins", *(f"{name}-octavo" for name in plugins))
        session.install(*map(str, (folder / "plugins").glob("*.whl")))
        settings = settings_of_tests(session, "in a hurry") | share_bytecode(session)
        for name in plugins:
            session.run("octavo", "conform", name, *session.posargs, env=settings)


@nox.session
def adapters(session: nox.Session) -> None:
    """Adapters inside the libraries that they are for, in the versions that they were written for."""
    fronts = ("octavo-jax", "octavo-torch")
    groups = (requirement for name in fronts for requirement in needed_by_tests(name))
    # octavo reads the text of a measurement of whole models
    install(session, "octavo", *fronts, extra=(*groups, "pytest-xdist", *ADAPTED))
    session.install("--no-deps", *ADAPTED_ALONE)
    files = (str(path) for path in sorted(ROOT.glob("packages/*/tests/adapters/test_*.py")))
    run_pytest(session, *files, "tests/documents/test_transformers_example.py", *session.posargs, xla="in a hurry")


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation; a warning is an error."""
    install(
        session,
        *DIRECTORIES,
        extra=("sphinx>=8", "myst-parser>=4", "furo", "sphinx-copybutton", "sphinx-design", "flax"),
    )
    build_html = ("sphinx-build", "-W", "--keep-going", "-b", "html", "docs", "docs/_build/html")
    session.run(*build_html, *session.posargs, env=share_bytecode(session))


@nox.session(default=False)
def demo(session: nox.Session) -> None:
    """The main job: train a small mixture-of-experts model in four recipes and write demo-output/."""
    install(session, "octavo", "octavo-torch", "octavo-jax")
    session.run("octavo", "train", *session.posargs)


@nox.session(default=False)
@nox.parametrize("package", SLOW, ids=SLOW)
def slow(session: nox.Session, package: str) -> None:
    """Everything that takes minutes: exhaustive casts, training gates, whole tables."""
    install(session, package, extra=needed_by_tests(package))
    session.run("pytest", DIRECTORIES[package], "--slow", "-m", "slow", *session.posargs)


@nox.session(default=False)
@nox.parametrize("package", list(DIRECTORIES), ids=list(DIRECTORIES))
def mutants(session: nox.Session, package: str) -> None:
    """Plant the bugs of tests/mutants/bugs one at a time and see which of them one package's default tests notice."""
    compiler = ("cmake>=3.26", "ninja", "jaxlib==0.6.2") if package == NATIVE else ()  # jaxlib for XLA's headers
    install(session, package, extra=(*needed_by_tests(package), *compiler))
    settings = settings_of_tests(session, effort_of(package))
    run = ("python", "tests/mutants/run.py", package, DIRECTORIES[package])
    session.run(*run, *session.posargs, env=settings)


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Every benchmark file; numbers are reported, not judged."""
    install(session, *DIRECTORIES, extra=("pytest", "pytest-benchmark"))
    files = [str(path) for name in DIRECTORIES.values() for path in sorted(Path(name).glob("benchmarks/bench_*.py"))]
    session.run("pytest", "--benchmark-only", "-o", "python_files=bench_*.py", *files, *session.posargs)
