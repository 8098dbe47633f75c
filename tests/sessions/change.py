"""The session that plain `nox` runs: every check of a change, several of them at a time."""

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

import nox
from workspace import ROOT

from sessions.backends import BACKENDS
from sessions.distributions import DIRECTORIES, NATIVE, closure, needed_by_tests, ours
from sessions.environment import CORES, WORKERS

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
    installed |= {name: ["octavo", "octavo-jax", "octavo-torch"] for name in ("adapters", "third_party")}
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
