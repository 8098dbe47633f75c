"""The session that tests the oldest dependencies which the packages declare."""

from __future__ import annotations

import json
import sys
from typing import Any

import nox
from packaging.requirements import Requirement
from workspace import ROOT

from sessions.distributions import DIRECTORIES, NATIVE, closure, needed_by_tests, ours, project
from sessions.environment import effort_of, local, run_pytest
from sessions.native_wheel import Kernels

RECORD = ROOT / "tests" / "golden" / "minimums.json"
ADAPTERS = ("transformers", "qwix", "tokamax")  # extras whose libraries need newer versions of our other dependencies
VERSIONS = (
    "import json, sys; from importlib.metadata import version; "
    "print(json.dumps({name: version(name) for name in sys.argv[1:]}))"
)


@nox.session(default=False)
def minimums(session: nox.Session) -> None:
    """Every package's tests with the oldest dependencies that the packages declare; what passes is recorded.

    One environment serves all packages, because none of them declares another floor than the others do for the same
    dependency (tests/test_minimums.py). The native packages join it after the others' tests, which look at the
    reference backends, and adapters come last, with the oldest versions of the libraries that they are for.
    tests/golden/minimums.json gets the versions that each package has passed with, and a default test compares them
    with what it declares. Needs uv. Positional arguments: packages, whose tests alone run; --without-cuda builds
    octavo-native without CUDA kernels.
    """
    chosen = [name for name in session.posargs if name != "--without-cuda"]
    if session.venv_backend != "uv" or set(chosen) - set(DIRECTORIES):
        session.error(
            f"minimums needs uv, and arguments that are packages ({', '.join(DIRECTORIES)}) or --without-cuda"
        )
    oldest = project("octavo-core")["requires-python"].removeprefix(">=")
    if "{}.{}".format(*sys.version_info) != oldest:
        session.error(f"nox runs on Python {sys.version.split()[0]}; the oldest that is declared is {oldest}: use that")
    requirements = {name: _required(name) for name in DIRECTORIES}
    everything = sorted(set().union(*requirements.values()))
    lowest = ("--resolution", "lowest-direct")
    kernels: Kernels | None = "none" if "--without-cuda" in session.posargs else None
    native = [name for name in DIRECTORIES if NATIVE in closure([name])]
    pure = [name for name in DIRECTORIES if name not in native]
    for packages, present in ((pure, pure), (native, [*pure, *native])):
        tested = [name for name in packages if name in (chosen or DIRECTORIES)]
        if tested:
            session.install(*lowest, *local(session, present, kernels), *everything)
        for name in tested:
            run_pytest(session, DIRECTORIES[name], "-p", "no:cacheprovider", xla=effort_of(name))
            _record(session, name, requirements[name])
    if not chosen:
        adapters = sorted(set().union(*(_required(name, adapters=True) for name in DIRECTORIES)))
        session.install(*lowest, *adapters, "einops")
        run_pytest(session, *(str(path) for path in sorted(ROOT.glob("packages/*/tests/adapters/test_*.py"))))
        _record(session, "adapters", adapters)


def _required(name: str, adapters: bool = False) -> list[str]:
    """What a package, its extras and its tests require of others; or, with `adapters`, the extras of these alone."""
    extras = project(name).get("optional-dependencies", {})
    found = [line for extra, lines in extras.items() for line in lines if (extra in ADAPTERS) == adapters]
    if not adapters:
        found += [*project(name).get("dependencies", []), *needed_by_tests(name)]
    return [line for line in found if not ours([line]) and _is_of_this_python(line)]


def _is_of_this_python(line: str) -> bool:
    """Whether a requirement's marker holds in the Python that runs nox, which is the oldest."""
    marker = Requirement(line).marker
    return marker is None or marker.evaluate()


def _record(session: nox.Session, name: str, requirements: list[str]) -> None:
    """Note the installed versions of these requirements as ones that `name` has passed with."""
    names = sorted({requirement.partition(">=")[0].partition("[")[0] for requirement in requirements})
    printed: Any = session.run("python", "-c", VERSIONS, *names, silent=True)
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    record[name] = {"python": "{}.{}".format(*sys.version_info), **json.loads(printed)}
    RECORD.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")
