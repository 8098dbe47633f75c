"""Every development task. `nox` runs the checks of a change, `nox -s demo` the main job, `nox -l` lists the rest."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import nox
from nox.project import dependency_groups, load_toml

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "uv|venv"
nox.options.error_on_missing_interpreters = True
nox.options.sessions = ["change"]

ROOT = Path(__file__).parent
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
    "octavo-jax-native": "packages/jax-native",
    "octavo-conformance": "packages/conformance",
    "octavo-bench": "packages/bench",
    "octavo": "packages/cli",
}
TEMPLATE = "docs/examples/acme-octavo"
TEMPLATES = (TEMPLATE, "docs/examples/acme-octavo-jax")
NATIVE = "octavo-native"
BACKENDS = {
    "torch-reference": "octavo-torch",
    "jax-reference": "octavo-jax",
    "torch-native": "octavo-torch-native",
    "torch-cudagraph": "octavo-torch-cudagraph",
    "jax-native": "octavo-jax-native",
}
ON_CUDA = ["torch-cudagraph"]  # backends that serve nothing else
SLOW = ["octavo-numerics", "octavo-jax", "octavo-bench", "octavo"]  # packages with tests that take minutes
COMPILES_MUCH = ("octavo-jax", "octavo-jax-native")
TOOLS = ("ruff==0.17.5", "clang-format==23.1.5", "mypy==2.4.1")
ADAPTED = (
    "qwix==0.1.8",
    "tokamax==0.0.12",
    "transformers==5.23.0",
    "spmd_types==0.2.3",
    "einops",
    "tyro",
    "pyyaml",
    "triton",
)
# Their requirements are whole training stacks, of which what is adapted imports those above.
ADAPTED_ALONE = ("torchtitan==0.3.0", "megatron-core==0.16.1", "nemo-automodel==0.7.0")

# uv reads no pip settings; an index mirror or a folder of wheels that pip was told of serves both.
if "PIP_FIND_LINKS" in os.environ:
    os.environ.setdefault("UV_FIND_LINKS", os.environ["PIP_FIND_LINKS"])
if "PIP_INDEX_URL" in os.environ:
    os.environ.setdefault("UV_DEFAULT_INDEX", os.environ["PIP_INDEX_URL"])
os.environ.setdefault("UV_PYTHON_DOWNLOADS", "never")
# Sessions start hundreds of processes. Without .pyc files each compiles torch and JAX anew: 3 and 2 seconds each time.
os.environ["PYTHONDONTWRITEBYTECODE"] = ""


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


def _local(session: nox.Session, distributions: list[str]) -> list[str]:
    """Arguments that install these packages from here: editable, and octavo-native as its one wheel."""
    pure = [name for name in distributions if name != NATIVE]
    editable = [part for name in pure for part in ("-e", str(ROOT / DIRECTORIES[name]))]
    return editable if NATIVE not in distributions else [*editable, str(_native_wheel(session)[0])]


def _install(session: nox.Session, *distributions: str, extra: tuple[str, ...] = ()) -> None:
    """Install workspace packages in one command: in two, the second half is sought on an index."""
    workspace = _closure([*distributions, *_ours(list(extra))])
    outside = [requirement for requirement in extra if not _ours([requirement])]
    session.install("-c", str(ROOT / "constraints.txt"), *_local(session, workspace), *outside)


def _tracked(*patterns: str) -> list[str]:
    """Files that git tracks; the clone also holds virtual environments of any name and what was built."""
    command = ("git", "-C", str(ROOT), "ls-files", "--", *patterns)
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout.splitlines()


def _nvcc() -> str | None:
    return os.environ.get("CUDACXX") or shutil.which("nvcc")


def _native_sources() -> list[Path]:
    """Every file that the wheel of octavo-native is made from, tracked or not: CMake compiles what lies there."""
    native = ROOT / DIRECTORIES[NATIVE]
    files = [native / name for name in ("pyproject.toml", "CMakeLists.txt", "README.md")]
    files += [path for part in ("cmake", "include", "lib", "src") for path in (native / part).rglob("*")]
    return sorted(path for path in files if path.is_file() and path.suffix not in (".pyc", ".so"))


def _native_wheel(session: nox.Session) -> tuple[Path, Path]:
    """The wheel of octavo-native and the log of its build, made once for all sessions and again when a source changes.

    The CUDA kernels take minutes to compile, and one artifact serves every Python from 3.11 on.
    """
    nvcc = _nvcc()
    compiler = subprocess.run([nvcc, "--version"], capture_output=True, check=True).stdout if nvcc else b""
    digest = hashlib.sha256(compiler + platform.platform().encode())
    for path in _native_sources():
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    folder = session.cache_dir.resolve() / "native" / digest.hexdigest()[:16]
    log = folder / "build.log"
    if not list(folder.glob("*.whl")):
        shutil.rmtree(folder.parent, ignore_errors=True)
        folder.mkdir(parents=True)
        cuda = f"cmake.define.OCTAVO_CUDA={'ON' if nvcc else 'OFF'}"
        if session.venv_backend == "uv":
            build = ("uv", "build", "--python", sys.executable, "--wheel", "-C", cuda, "--out-dir", str(folder))
        else:
            build = ("python", "-m", "pip", "wheel", "-v", "--no-deps", "-C", cuda, "--wheel-dir", str(folder))
        session.log(f"octavo-native: compiling {'with' if nvcc else 'without'} CUDA kernels; output in {log}")
        with log.open("w") as output:
            source = str(ROOT / DIRECTORIES[NATIVE])
            session.run(*build, source, stdout=output, stderr=subprocess.STDOUT, success_codes=range(256))
        if not list(folder.glob("*.whl")):
            session.error("octavo-native does not build:\n" + log.read_text(errors="replace")[-8000:])
    (wheel,) = folder.glob("*.whl")
    return wheel, log


def _pytest(session: nox.Session, *arguments: str, in_a_hurry: bool = False) -> None:
    """pytest with one worker per core; what XLA compiles is kept, because compiling is most of the JAX tests' time.

    Work is divided by module, so that a module's fixture (a whole training run) is set up once and not once per worker.
    JAX has eight devices everywhere: tests of sharding need them, and a program compiled for another number of devices
    is another program. PYTEST_XDIST_AUTO_NUM_WORKERS sets another number of workers; one is this process itself.

    in_a_hurry   XLA rewrites programs as always, but LLVM optimizes nothing: half of the time to compile
    """
    count = int(os.environ.get(WORKERS) or min(CORES, 8))
    workers = str(count if count > 1 else 0)
    settings = _test_settings(session, in_a_hurry)
    session.run("pytest", "-n", workers, "--dist", "loadscope", *arguments, *session.posargs, env=settings)


def _test_settings(session: nox.Session, in_a_hurry: bool) -> dict[str, str]:
    """Environment variables of a test run, see `_pytest`."""
    flags = [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8"]
    settings = {
        "OMP_NUM_THREADS": "1",  # beside workers, torch's threads only wait for each other
        "JAX_COMPILATION_CACHE_DIR": str(session.cache_dir.resolve() / "xla"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    if in_a_hurry:
        flags.append("--xla_cpu_use_fusion_emitters=false")
        settings["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    return settings | {"XLA_FLAGS": " ".join(flags).strip()}


def _test_group(distribution: str) -> tuple[str, ...]:
    pyproject = load_toml(ROOT / DIRECTORIES[distribution] / "pyproject.toml")
    return tuple(dependency_groups(pyproject, "test"))


# These take longest and start first, in this order: a long session that starts last leaves the other cores idle.
LONGEST_FIRST = (
    *("native", "tests(octavo-jax)", "conformance(jax-reference)", "tests(octavo-jax-native)", "integration"),
    *("conformance(jax-native)", "tests(octavo-torch-native)", "types", "tests(octavo-bench)", "tests(octavo)"),
    *("tests(octavo-numerics)", "tests(octavo-conformance)", "adapters", "third_party", "tests(octavo-torch)"),
    *("conformance(torch-native)", "docs", "conformance(torch-reference)"),
)


def _checks() -> dict[str, bool]:
    """Every session that a change must pass, in the order of their start, and whether it needs the native wheel."""
    everything = list(DIRECTORIES)
    installed = {"native": [], "lint": [], "types": everything, "docs": everything, "integration": everything}
    installed |= {"adapters": ["octavo-jax", "octavo-torch"], "third_party": ["octavo", "octavo-torch"]}
    installed |= {f"tests({name})": [name, *_ours(list(_test_group(name)))] for name in everything}
    installed |= {f"conformance({backend})": [owner, "octavo-conformance"] for backend, owner in BACKENDS.items()}
    order = {name: place for place, name in enumerate(LONGEST_FIRST)}
    names = sorted(installed, key=lambda name: order.get(name, len(order)))
    return {name: NATIVE in _closure(installed[name]) for name in names}


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
    queue = _Queue(_checks())

    def work() -> None:
        while (name := queue.take()) is not None:
            log, start = logs / f"{name}.log", time.monotonic()
            command = (sys.executable, "-m", "nox", "-s", name, "--", *session.posargs)
            with log.open("w") as output:
                run = subprocess.run(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
            text = log.read_text(errors="replace")
            if run.returncode:
                session.warn(f"output of {name}:\n{text}")
            counts = re.findall(r"^=+ (.*) in [^=]*=+$", text, flags=re.MULTILINE)
            outcome = "passed" if run.returncode == 0 else "FAILED"
            session.log(" ".join([f"{name} {outcome} after {time.monotonic() - start:.0f} s", *counts[-1:]]))
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
    places = sorted({name.split("/")[0] for name in _tracked("*.py", "*.pyi")})  # folders: new files are linted, too
    session.run("ruff", "format", "--check", *places)
    session.run("ruff", "check", *places)
    sources = _tracked(
        *(f"native/{folder}/*.{kind}" for folder in ("lib", "include") for kind in ("h", "cpp", "cu", "cuh"))
    )
    session.run("clang-format", "--dry-run", "-Werror", *sources)


@nox.session
def native(session: nox.Session) -> None:
    """Compile octavo-native, which every other session then installs; what ptxas says of its kernels is a gate."""
    wheel, log = _native_wheel(session)
    session.log(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB")
    if _nvcc() is None:
        session.skip("there is no nvcc (PATH or CUDACXX): kernels are built for the CPU alone, and ptxas says nothing")
    session.run("python", "native/tools/ptxas_report.py", str(log), "--check")


@nox.session
def types(session: nox.Session) -> None:
    """mypy --strict over every package, the plugin template, the tools, and functions that do not fit the contract."""
    _install(session, *DIRECTORIES, extra=(*TOOLS[2:], "flax", "safetensors"))
    sources = (str(Path(directory, "src")) for directory in (*DIRECTORIES.values(), *TEMPLATES))
    session.run("mypy", *sources, "native/tools", "registry/tests/contract/wrong_signatures.py")


@nox.session
@nox.parametrize("package", list(DIRECTORIES), ids=list(DIRECTORIES))
def tests(session: nox.Session, package: str) -> None:
    """One package's tests, with its declared dependencies alone.

    Those of JAX's packages compile most, and in a hurry: bits as users have them are the conformance session's.
    """
    _install(session, package, extra=(*_test_group(package), "pytest-xdist"))
    _pytest(session, DIRECTORIES[package], in_a_hurry=package in COMPILES_MUCH)


@nox.session
@nox.parametrize("backend", list(BACKENDS), ids=list(BACKENDS))
def conformance(session: nox.Session, backend: str) -> None:
    """The conformance suite on one backend of ours, whose card declares all that works."""
    if backend in ON_CUDA and shutil.which("nvidia-smi") is None:
        session.skip(f"{backend} serves CUDA devices alone, and there is none here; nox -s gpu runs its suite")
    _install(session, BACKENDS[backend], "octavo-conformance", extra=("pytest-xdist",))
    Path("reports").mkdir(exist_ok=True)
    suite = ("--pyargs", "octavo_conformance.suite", "--octavo-backend", backend)
    undeclared = ("-W", "error::octavo_conformance.UndeclaredCapability")
    _pytest(session, *suite, *undeclared, f"--octavo-report=reports/{backend}.json")


@nox.session
def integration(session: nox.Session) -> None:
    """What needs several packages: the arrows, both frameworks' bits, the README's code."""
    _install(
        session,
        *DIRECTORIES,
        extra=("pytest", "pytest-xdist", "sybil", "flax", "flatbuffers", "pyyaml", "safetensors", "-e", TEMPLATE),
    )
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
def adapters(session: nox.Session) -> None:
    """Adapters inside the libraries that they are for, in the versions that they were written for."""
    fronts = ("octavo-jax", "octavo-torch")
    groups = (requirement for name in fronts for requirement in _test_group(name))
    _install(session, *fronts, extra=(*groups, "pytest-xdist", *ADAPTED))
    session.install("--no-deps", *ADAPTED_ALONE)
    _pytest(
        session,
        *(str(path) for name in fronts for path in sorted(ROOT.glob(f"{DIRECTORIES[name]}/tests/adapters/test_*.py"))),
    )


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation; a warning is an error."""
    _install(
        session,
        *DIRECTORIES,
        extra=("sphinx>=8", "myst-parser>=4", "furo", "sphinx-copybutton", "sphinx-design", "flax"),
    )
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
@nox.parametrize("package", list(DIRECTORIES), ids=list(DIRECTORIES))
def mutants(session: nox.Session, package: str) -> None:
    """Plant the bugs of tests/mutants/bugs one at a time and see which of them one package's default tests notice."""
    compiler = ("cmake>=3.26", "ninja", "jaxlib==0.6.2") if package == NATIVE else ()  # jaxlib for XLA's headers
    _install(session, package, extra=(*_test_group(package), *compiler))
    settings = _test_settings(session, in_a_hurry=package in COMPILES_MUCH)
    run = ("python", "tests/mutants/run.py", package, DIRECTORIES[package])
    session.run(*run, *session.posargs, env=settings)


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
    outside = [requirement for requirement in _test_group(package) if not _ours([requirement])]
    if NATIVE in workspace:  # what a wheel requires is no direct requirement
        outside += _project(NATIVE)["dependencies"]
    session.install("--resolution", "lowest-direct", *_local(session, workspace), *outside)
    session.run("pytest", DIRECTORIES[package], *session.posargs)


def _build(session: nox.Session, dist: Path, *directories: str) -> None:
    for directory in directories:
        if directory == DIRECTORIES[NATIVE]:
            dist.mkdir(parents=True, exist_ok=True)
            shutil.copy(_native_wheel(session)[0], dist)
        else:
            session.run(
                "pyproject-build", "--installer", "uv", "--wheel", "--outdir", str(dist), directory, silent=True
            )


@nox.session(default=False)
def wheels(session: nox.Session) -> None:
    """Build every package into dist/, then install one plugin from there alone into an empty environment.

    Installing finds no compiler and takes no sources. The one wheel of octavo-native keeps to the stable ABI, and every
    other Python that is found here must import it, too.
    """
    shutil.rmtree("dist", ignore_errors=True)
    session.install("build[uv]", "virtualenv", "abi3audit")
    _build(session, Path("dist"), *DIRECTORIES.values())
    session.run("abi3audit", "--strict", *map(str, Path("dist").glob("octavo_native-*.whl")))
    plugin = session.posargs[0] if session.posargs else "octavo-torch-native"
    ours = _closure([plugin])
    outside = _outside(ours)
    python, pip = _empty_environment(session, sys.executable)
    session.run(*pip, "-c", "constraints.txt", *outside, external=True)
    no_compiler = {"PATH": str(Path(python).parent), "CC": "false", "CXX": "false"}
    session.run(*pip, "--no-index", "--find-links", "dist", plugin, external=True, env=no_compiler)
    session.run(python, "-m", "octavo_registry", "doctor", external=True)
    for version in ("3.11", "3.12", "3.13"):
        found = _interpreter(version)
        if version == "{}.{}".format(*sys.version_info):
            continue
        if found is None:
            session.log(f"python{version} is not here: its import of octavo-native is not tried")
            continue
        python, pip = _empty_environment(session, found)
        session.run(*pip, *_outside([NATIVE]), external=True)
        session.run(*pip, "--no-index", "--find-links", "dist", NATIVE, external=True)
        session.run(python, "-c", "import octavo_native; print(octavo_native.build_info())", external=True)


@nox.session(default=False)
def release(session: nox.Session) -> None:
    """Prepare a release: `nox -s release -- 0.3.0` writes versions and changelogs, builds dist/ and tests it.

    Every package gets the version and asks for the others at that version or newer, its fragments become a section of
    its changelog, and dist/ holds its wheel and its sdist. Each sdist must make the same wheel, each package's tests
    run on the wheels alone, and the README's install lines run. Nothing is committed, tagged or uploaded.
    """
    if len(session.posargs) != 1 or not re.fullmatch(r"\d+\.\d+\.\d+", session.posargs[0]):
        session.error(f"a release has one version, as 0.3.0; given were {session.posargs}")
    session.install("build[uv]", "towncrier", "virtualenv")
    (version,) = session.posargs
    _set_versions(version)
    _write_changelogs(session, version)
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    for name, directory in DIRECTORIES.items():
        _build(session, dist, directory)
        session.run("pyproject-build", "--installer", "uv", "--sdist", "--outdir", str(dist), directory, silent=True)
        if name != NATIVE:
            _check_sdist(session, dist, name.replace("-", "_"), version)
    wheels = ("-c", "constraints.txt", "--find-links", str(dist), "--only-binary", ":all:")
    for name, directory in DIRECTORIES.items():
        python, pip = _empty_environment(session, sys.executable)
        exact = [f"{needed}=={version}" for needed in _closure([name, *_ours(list(_test_group(name)))])]
        outside = [requirement for requirement in _test_group(name) if not _ours([requirement])]
        session.run(*pip, *wheels, *exact, *outside, external=True)
        settings = _test_settings(session, in_a_hurry=name in COMPILES_MUCH)
        session.run(python, "-m", "pytest", "-q", directory, external=True, env=settings)
    for extras in ("torch", "jax", "all"):
        python, pip = _empty_environment(session, sys.executable)
        session.run(*pip, *wheels, f"octavo[{extras}]=={version}", external=True)
        session.run(python, "-m", "octavo_registry", "doctor", external=True)


def _set_versions(version: str) -> None:
    """Write a version into every package, and the floors of what they ask of each other."""
    floor = version.rpartition(".")[0]
    for name, directory in DIRECTORIES.items():
        pyproject = ROOT / directory / "pyproject.toml"
        text = re.sub(r'(?m)^version = ".*"$', f'version = "{version}"', pyproject.read_text(), count=1)
        pyproject.write_text(re.sub(r'("octavo[a-z-]*(?:\[[a-z,-]*\])?>=)[\d.]+', rf"\g<1>{floor}", text))
        module = "octavo_cli" if name == "octavo" else name.removesuffix("-core").replace("-", "_")
        source = ROOT / directory / "src" / module / "__init__.py"
        source.write_text(re.sub(r'(?m)^__version__ = ".*"$', f'__version__ = "{version}"', source.read_text()))
    citation = ROOT / "CITATION.cff"
    citation.write_text(re.sub(r"(?m)^version: .*$", f"version: {version}", citation.read_text()))


def _write_changelogs(session: nox.Session, version: str) -> None:
    """The fragments of each package as a section of its changelog; towncrier looks for its template in the package."""
    config = Path(session.create_tmp()).resolve() / "towncrier.toml"
    template = '"changes.md.jinja"'
    config.write_text((ROOT / "pyproject.toml").read_text().replace(template, f"'{ROOT / template.strip(chr(34))}'"))
    for name, directory in DIRECTORIES.items():
        where = ("--config", str(config), "--dir", str(ROOT / directory))
        session.run("towncrier", "build", *where, "--name", name, "--version", version, "--yes", silent=True)


def _check_sdist(session: nox.Session, dist: Path, stem: str, version: str) -> None:
    """Fail unless an sdist, alone in an empty folder, becomes a wheel with the files of the one in dist/."""
    folder = Path(session.create_tmp()).resolve() / "sdist"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.unpack_archive(dist / f"{stem}-{version}.tar.gz", folder)
    source = str(folder / f"{stem}-{version}")
    session.run("pyproject-build", "--installer", "uv", "--wheel", "--outdir", str(folder), source, silent=True)
    wheel = f"{stem}-{version}-py3-none-any.whl"
    ours, theirs = (set(zipfile.ZipFile(path / wheel).namelist()) for path in (dist, folder))
    if ours != theirs:
        session.error(f"the sdist of {stem} makes another wheel; only one of them has {sorted(ours ^ theirs)}")


def _interpreter(version: str) -> str | None:
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


def _outside(distributions: list[str]) -> list[str]:
    """What these packages of the workspace require of others."""
    required = [requirement for name in distributions for requirement in _project(name).get("dependencies", [])]
    return [requirement for requirement in required if not _ours([requirement])]


def _empty_environment(session: nox.Session, interpreter: str) -> tuple[str, tuple[str, ...]]:
    """Python of a new environment and its command to install wheels."""
    folder = Path(session.create_tmp()).resolve() / Path(interpreter).name
    shutil.rmtree(folder, ignore_errors=True)
    session.run("virtualenv", "--python", interpreter, str(folder), silent=True)
    python = str(folder / ("Scripts" if sys.platform == "win32" else "bin") / "python")
    return python, (python, "-m", "pip", "install", "--quiet", "--only-binary", ":all:")


SANITIZERS = {  # tool of compute-sanitizer: arguments of native/tests/sanitize.py
    "memcheck": (),
    "racecheck": (),
    "initcheck": ("--tail", "unwritten"),  # rows past the sum have no value, so whoever reads them is seen
    "synccheck": (),
}


@nox.session(default=False, venv_backend="none")
def gpu(session: nox.Session) -> None:
    """What needs a CUDA device, in the environment that runs nox: drivers and frameworks are its own.

    The kernels' tests, the native plugins' CUDA tests, the conformance suite on every installed backend, then each
    tool of compute-sanitizer over every kernel, where it is on PATH. Positional arguments choose backends.
    """
    _pytest_on_gpu(session, "native/tests", "-k", "cuda")
    for directory in ("packages/torch", "packages/torch-native", "packages/torch-cudagraph", "packages/jax-native"):
        _pytest_on_gpu(session, *map(str, sorted(Path(directory, "tests").rglob("test_cuda*.py"))))
    for backend in session.posargs or [name for name, owner in BACKENDS.items() if _is_installed(owner)]:
        _pytest_on_gpu(session, "--pyargs", "octavo_conformance.suite", "-k", "cuda", "--octavo-backend", backend)
    session.run(sys.executable, "native/tests/sanitize.py")
    if shutil.which("compute-sanitizer") is None:
        session.warn("compute-sanitizer is not on PATH, so its four tools did not run; it comes with the CUDA toolkit")
        return
    for tool, arguments in SANITIZERS.items():
        watch = ("compute-sanitizer", "--tool", tool, "--error-exitcode", "3", "--print-limit", "20")
        session.run(*watch, sys.executable, "native/tests/sanitize.py", *arguments, external=True)


def _pytest_on_gpu(session: nox.Session, *arguments: str) -> None:
    """pytest with six processes on the GPU where pytest-xdist is installed: most of a test's time is its host's.

    What frameworks of the environment warn of is told and no failure: their versions are not ours.
    """
    workers = ("-n", "6", "--dist", "loadscope", "-p", "no:benchmark") if _is_installed("pytest-xdist") else ()
    theirs = ("-W", "default::UserWarning", "-W", "default::DeprecationWarning", "-W", "default::FutureWarning")
    shared = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # one process would take the memory of all
    session.run(sys.executable, "-m", "pytest", *workers, *theirs, *arguments, env=shared)


def _is_installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True
