"""Calls into code that is not ours: what it raises becomes text, and the process lives."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

LOGGER = "octavo.plugins"
"""The logger that has, at level DEBUG, the traceback of whatever foreign code raised."""

log = logging.getLogger(LOGGER)
_LONGEST = 300
_STDOUT_IS_KEPT: ContextVar[bool] = ContextVar("stdout_is_kept", default=False)


class Fault(Exception):
    """Foreign code failed; the message is its error's type and text on one line."""


def describe(error: BaseException) -> str:
    """`ModuleNotFoundError: No module named 'acme'`: one line, shortened where it is very long."""
    try:
        text = " ".join(str(error).split())
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException:  # a foreign __str__ may raise, too, or call sys.exit
        text = "(its text cannot be shown)"
    line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return line if len(line) <= _LONGEST else line[: _LONGEST - 3] + "..."


@contextmanager
def stdout_kept() -> Iterator[None]:
    """Inside, what foreign code prints goes to stderr: a command's stdout is its answer, which may be JSON."""
    token = _STDOUT_IS_KEPT.set(True)
    try:
        yield
    finally:
        _STDOUT_IS_KEPT.reset(token)


def guard(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """`function(*args, **kwargs)`, whose errors are raised as `Fault`.

    BaseException rather than Exception: a plugin may call `sys.exit` while it is imported, and a panic of a
    Rust extension (pyo3's PanicException) is no Exception. What the user or the interpreter asked for passes.
    """
    place: AbstractContextManager[Any] = redirect_stdout(sys.stderr) if _STDOUT_IS_KEPT.get() else nullcontext()
    try:
        with place:
            return function(*args, **kwargs)
    except (KeyboardInterrupt, GeneratorExit, Fault):
        raise
    except BaseException as error:
        log.debug("%s", describe(error), exc_info=error)
        raise Fault(describe(error)) from error
