"""`--traceback`: where in a plugin an error came from. Messages keep one line; the file and the line are here."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from octavo_registry.discovery.guard import LOGGER


@contextmanager
def tracebacks(wanted: bool) -> Iterator[None]:
    """While it lasts and where it is wanted, the traceback of whatever a guard stops goes to stderr."""
    if not wanted:
        yield
        return
    log = logging.getLogger(LOGGER)
    handler = logging.StreamHandler(sys.stderr)
    level, propagates = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = propagates
