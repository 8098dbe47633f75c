"""Every development task. `nox` runs the checks of a change, `nox -s demo` the main job, `nox -l` lists the rest."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import nox
from nox.command import CommandFailed

sys.path.insert(0, str(Path(__file__).parent / "tests"))
from sessions.distributions import DIRECTORIES, NATIVE, closure, needed_by_tests, ours
from sessions.environment import CORES, WORKERS, effort_of, install, run_pytest, settings_of_tests, share_bytecode
from sessions.minimums import minimums  # noqa: F401  # nox finds sessions by their decorator
from sessions.native_wheel import Kernels, kernels_of_tests, native_wheel, nvcc
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
BACKENDS = {
    "torch-reference": "octavo-torch",
    "jax-reference": "octavo-jax",
    "torch-native": "octavo-torch-native",
    "torch-cudagraph": "octavo-torch-cudagraph",
    "jax-native": "octavo-jax-native",
    "torch-triton": "octavo-torch-triton",
    "torch-triton-interpreter": "octavo-torch-triton",
    "jax-triton": "octavo-jax-triton",
    "jax-triton-interpreter": "octavo-jax-triton",
}
ON_CUDA = ["torch-cudagraph", "torch-triton", "jax-triton"]  # backends that serve nothing else
INTERPRETED = ["torch-triton-interpreter", "jax-triton-interpreter"]
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

# These take longest and start first, in this order: a long session that starts last leaves the other cores idle.
LONGEST_FIRST = (
    *("native", "tests(octavo-jax)", "tests(octavo-torch)", "conformance(jax-reference)", "integration"),
    *("tests(octavo-jax-native)", "docs", "tests(octavo-torch-native)", "adapters", "tests(octavo-conformance)"),
    *("tests(octavo)", "tests(octavo-bench)", "third_party", "types", "tests(octavo-torch-triton)"),
    *("tests(octavo-jax-triton)", "conformance(torch-triton-interpreter)", "conformance(torch-reference)"),
    *("conformance(jax-native)", "conformance(torch-native)", "tests(octavo-native)", "tests(octavo-numerics)"),
)


def _checks() -> dict[str, bool]:
    """Every session that a change must pass, in the order of their start, and whether it needs the native wheel."""
    everything = list(DIRECTORIES)
    installed = {"native": [], "lint": [], "types": everything, "docs": everything, "integration": everything}
    installed |= {"adapters": ["octavo", "octavo-jax", "octavo-torch"], "third_party": ["octavo", "octavo-torch"]}
    installed |= {f"tests({name})": [name, *ours(list(needed_by_tests(name)))] for name in everything}
    # torch-triton-interpreter runs the same kernels through the suite
    suites = {backend: owner for backend, owner in BACKENDS.items() if backend != "jax-triton-interpreter"}
    installed |= {f"conformance({backend})": [owner, "octavo-conformance"] for backend, owner in suites.items()}
    order = {name: place for place, name in enumerate(LONGEST_FIRST)}
    names = sorted(installed, key=lambda name: order.get(name, len(order)))
    return {name: NATIVE in closure(installed[name]) for name in names}


class _Queue:
    """Sessions that have not started yet; those that need the native wheel wait until it is compiled."""

    def __init__(self, checks: dict[str, bool]) -> None:
        self.waiting = dict(checks)
        self.passed: dict[str, bool] = {}
        self.changed = threading.Condition()

    def take(self) -> str | None:
        """The next session that can start; None when there is none left."""
        with self.changed:
            while self.waiting:
                wheel = self.passed.get("native")
                name = next((name for name, needs_wheel in self.waiting.items() if wheel or not needs_wheel), None)
                if name is not None:
                    del self.waiting[name]
                    return name
                if wheel is False:
                    return None
                self.changed.wait()
            return None

    def finish(self, name: str, passed: bool) -> None:
        with self.changed:
            self.passed[name] = passed
            self.changed.notify_all()


@nox.session(venv_backend="none")
def change(session: nox.Session) -> None:
    """Everything that a change must pass: every session whose default is not False, several of them at a time.

    A session alone leaves cores idle while it installs, imports, collects and waits for its last test. Here each has
    its share of the cores. Outputs go to .nox/.cache/logs, those of failed sessions to the terminal, too.
    """
    lanes = min(CORES, 4)
    environment = {
        **os.environ,
        WORKERS: str(max(1, min(CORES // lanes, 8))),
        "PYTEST_ADDOPTS": f"{os.environ.get('PYTEST_ADDOPTS', '')} -p no:cacheprovider".strip(),  # one folder for all
    }
    logs = session.cache_dir.resolve() / "logs"
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir()
    of_tests = session.cache_dir.resolve() / "bytecode" / tempfile.gettempdir().strip("/")  # of modules they wrote
    shutil.rmtree(of_tests, ignore_errors=True)
    queue = _Queue(_checks())

    def work() -> None:
        while (name := queue.take()) is not None:
            log, start = logs / f"{name}.log", time.monotonic()
            command = (sys.executable, "-m", "nox", "-s", name, "--", *session.posargs)
            with log.open("w") as output:
                run = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
                _, status, usage = os.wait4(run.pid, 0)
            run.returncode = os.waitstatus_to_exitcode(status)
            text = log.read_text(errors="replace")
            if run.returncode:
                session.warn(f"output of {name}:\n{text}")
            counts = re.findall(r"^=+ (.*) in [^=]*=+$", text, flags=re.MULTILINE)
            outcome = "passed" if run.returncode == 0 else "FAILED"
            wall, busy = time.monotonic() - start, usage.ru_utime + usage.ru_stime
            session.log(" ".join([f"{name} {outcome} after {wall:.0f} s, {busy:.0f} of a processor;", *counts[-1:]]))
            queue.finish(name, run.returncode == 0)

    with ThreadPoolExecutor(lanes) as pool:
        running = [pool.submit(work) for _ in range(lanes)]
        try:
            for lane in running:
                lane.result()
        except BaseException:  # Ctrl-C, which has ended the running sessions, too
            queue.waiting.clear()
            raise
    failed = [name for name, passed in queue.passed.items() if not passed]
    failed += [f"{name} (not run, because native failed)" for name in queue.waiting]
    if failed:
        session.error(f"failed: {', '.join(failed)}")


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
    """A plugin made from the template, out of the tree, installed from wheels with all it needs, through the suite."""
    folder = Path(session.create_tmp()).resolve()
    shutil.rmtree(folder, ignore_errors=True)
    session.install("uv")
    needed = closure(["octavo", "octavo-torch", "octavo-conformance"])
    build(session, folder / "dist", *(DIRECTORIES[name] for name in needed))
    session.install("-c", "constraints.txt", *map(str, sorted((folder / "dist").glob("*.whl"))))
    with session.chdir(folder):
        session.run("octavo", "new", "zenith")
        build(session, folder / "plugin", "zenith-octavo")
        session.install(*map(str, (folder / "plugin").glob("*.whl")))
        settings = settings_of_tests(session, "as users have it") | share_bytecode(session)
        session.run("octavo", "conform", "zenith", *session.posargs, env=settings)


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


SANITIZERS = {  # tool of compute-sanitizer: arguments of native/tests/sanitize.py
    "memcheck": (),
    "racecheck": (),
    "initcheck": ("--tail", "unwritten"),  # rows past the sum have no value, so whoever reads them is seen
    "synccheck": (),
}


@nox.session(default=False, venv_backend="none")
def gpu(session: nox.Session) -> None:
    """What needs a CUDA device, in the environment that runs nox: drivers and frameworks are its own.

    The kernels' tests, the native plugins' CUDA tests, the conformance suite on every installed backend, then the
    tools of compute-sanitizer over every kernel, all at a time, where it is on PATH. A part that fails does not keep
    the others from running. Positional arguments choose backends.
    """
    # a file of CUDA tests alone has it in its name, a test of both devices in its parameters
    of_cuda = ("native", "packages/torch", "packages/torch-native", "packages/torch-cudagraph", "packages/jax-native")
    parts = {f"{directory}/tests": _pytest_on_gpu(f"{directory}/tests", "-k", "cuda") for directory in of_cuda}
    # modules share nothing, and a few of them take most of the time
    parts["native/tests"] = _pytest_on_gpu("native/tests", "-k", "cuda", dist="worksteal")
    for name in ("octavo-torch-triton", "octavo-jax-triton"):
        if _is_installed(name):  # whose device is the GPU where there is one
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
