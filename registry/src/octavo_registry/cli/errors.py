"""What a command raises, as an exit code and one line (or one JSON object) on stderr."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import typer

from octavo import OctavoError

BROKEN = 1
"""Exit code: the thing that was asked about is broken, or nothing serves it."""

BAD_INPUT = 2
"""Exit code: the question itself is wrong."""


STOPPED = 130
"""Exit code: Ctrl-C, as shells have it."""


class BadInput(OctavoError, ValueError):
    """A wrong argument; the message names it, says what is needed and what to do."""


def explained(error: BaseException) -> tuple[str, int] | None:
    """Message and exit code of an error that users can mend; None: it is a defect, and its traceback is wanted.

    A ValueError among Octavo's errors is bad input, another one says that something is broken or unserved.
    """
    if isinstance(error, OctavoError):
        return str(error), BAD_INPUT if isinstance(error, ValueError) else BROKEN
    if isinstance(error, OSError) and error.filename is None and error.errno == errno.ENOSPC:
        return "there is no space left for the output; write it elsewhere", BROKEN
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}; give a path that can be read or written", BAD_INPUT
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # click's own, vendored or not
        context = getattr(error, "ctx", None)
        message = str(error.format_message()).rstrip(".") or "nothing was asked for"
        hint = f"; try `{context.command_path} --help`" if context is not None else ""
        return message + hint, BAD_INPUT
    if isinstance(error, typer.Abort):
        return "aborted", BROKEN
    return None


def fail(error: BaseException, arguments: Sequence[str]) -> NoReturn:
    """Say what is wrong and exit; raises `error` again where it is a defect."""
    known = explained(error)
    if known is None:
        raise error
    message, code = known
    if "--json" in arguments:
        record = {"error": {"type": type(error).__name__, "message": message, "exit_code": code}}
        print(json.dumps(record), file=sys.stderr)
    else:
        print(f"octavo: {message}", file=sys.stderr)
    _flush_or_drop_stdout()
    sys.exit(code)


def _flush_or_drop_stdout() -> None:
    """Python flushes stdout again when it ends; where that fails it adds lines and takes an exit code of its own."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
