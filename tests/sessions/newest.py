"""The session that tests the newest releases of what the packages depend on."""

from __future__ import annotations

import nox

from sessions.distributions import DIRECTORIES, closure, needed_by_tests, ours
from sessions.environment import local, run_pytest


@nox.session(default=False)
def newest(session: nox.Session) -> None:
    """Packages' tests with the newest releases of their dependencies; the checks of a change take constraints.txt's.

    Run it on the newest Python: some libraries make no releases for older ones. XLA compiles as users have it, because
    its flags come and go. Positional arguments: packages, whose tests alone run.
    """
    unknown = set(session.posargs) - set(DIRECTORIES)
    if unknown:
        session.error(f"newest takes packages, not {', '.join(sorted(unknown))}: {', '.join(DIRECTORIES)}")
    for name in session.posargs or DIRECTORIES:
        needed = list(needed_by_tests(name))
        theirs = [requirement for requirement in needed if not ours([requirement])]
        session.install("--upgrade", *local(session, closure([name, *ours(needed)])), *theirs, "pytest-xdist")
        run_pytest(session, DIRECTORIES[name], "-p", "no:cacheprovider")
