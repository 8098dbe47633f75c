"""The session that tests the oldest dependencies which the packages declare."""

from __future__ import annotations

import json
import sys
from typing import Any

import nox
from workspace import ROOT

from sessions.environment import (
    COMPILES_MUCH,
    DIRECTORIES,
    NATIVE,
    closure,
    local,
    needed_by_tests,
    ours,
    outside,
    project,
    run_pytest,
)

RECORD = ROOT / "tests" / "golden" / "minimums.json"
ADAPTERS = ("transformers", "qwix", "tokamax")  # extras whose libraries need newer versions of our other dependencies
VERSIONS = (
    "import json, sys; from importlib.metadata import version; "
    "print(json.dumps({name: version(name) for name in sys.argv[1:]}))"
)


@nox.session(default=False)
def minimums(session: nox.Session) -> None:
    """Every package's tests with the oldest dependencies that the packages declare, recorded where all pass.

    One environment serves all packages, because none of them declares another floor than the others do for the same
    dependency (tests/test_minimums.py). The native packages join it after the others' tests, which look at the
    reference backends, and adapters come last, with the oldest versions of the libraries that they are for.
    tests/golden/minimums.json then holds the versions, which a default test compares with what is declared. Needs uv.
    Positional arguments: packages, of which the tests alone run, and nothing is recorded; --without-cuda builds
    octavo-native without CUDA kernels.
    """
    chosen = [name for name in session.posargs if name != "--without-cuda"]
    if session.venv_backend != "uv" or set(chosen) - set(DIRECTORIES):
        session.error(
            f"minimums needs uv, and arguments that are packages ({', '.join(DIRECTORIES)}) or --without-cuda"
        )
    oldest = project("octavo-core")["requires-python"].removeprefix(">=")
    if "{}.{}".format(*sys.version_info) != oldest:
        session.error(
            f"nox runs on Python {sys.version.split()[0]} and the oldest that is declared is {oldest}; use that"
        )
    everything, adapters = _declared()
    lowest = ("--resolution", "lowest-direct")
    cuda = "--without-cuda" not in session.posargs
    native = [name for name in DIRECTORIES if NATIVE in closure([name])]
    pure = [name for name in DIRECTORIES if name not in native]
    for packages, present in ((pure, pure), (native, [*pure, *native])):
        tested = [name for name in packages if name in (chosen or DIRECTORIES)]
        if tested:
            session.install(*lowest, *local(session, present, cuda), *everything)
        for name in tested:
            run_pytest(session, DIRECTORIES[name], "-p", "no:cacheprovider", in_a_hurry=name in COMPILES_MUCH)
    if chosen:
        return
    versions = _installed(session, everything)
    session.install(*lowest, *adapters, "einops")
    record = {"python": oldest, "versions": versions, "adapters": _installed(session, adapters)}
    run_pytest(session, *(str(path) for path in sorted(ROOT.glob("packages/*/tests/adapters/test_*.py"))))
    RECORD.write_text(json.dumps(record, indent=2) + "\n")


def _declared() -> tuple[list[str], list[str]]:
    """What the packages and their tests require of others: adapters' libraries apart."""
    everything, adapters = set(outside(list(DIRECTORIES))), set()
    for name in DIRECTORIES:
        everything |= {requirement for requirement in needed_by_tests(name) if not ours([requirement])}
        for extra, requirements in project(name).get("optional-dependencies", {}).items():
            theirs = {requirement for requirement in requirements if not ours([requirement])}
            (adapters if extra in ADAPTERS else everything).update(theirs)
    return sorted(everything), sorted(adapters)


def _installed(session: nox.Session, requirements: list[str]) -> dict[str, str]:
    """The version of each required distribution in the session's environment."""
    names = sorted({requirement.partition(">=")[0].partition("[")[0] for requirement in requirements})
    printed: Any = session.run("python", "-c", VERSIONS, *names, silent=True)
    return dict(json.loads(printed))
