"""Files that commands write: checked before the work, and written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from octavo_registry.cli.errors import BadInput


def check_writable(option: str, path: Path, example: str = "results.json") -> None:
    """`BadInput` where `path`, the value of `option`, could not be written after the work. Leaves nothing behind."""
    if path.is_dir():
        raise BadInput(f"{option} {path}: this is a folder; name a file such as {path / example}")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise BadInput(f"{option} {path}: there is no folder {folder}; create it or name another")
    try:
        with tempfile.NamedTemporaryFile(prefix=f".{path.name}.", dir=folder):
            pass
    except OSError as error:
        raise BadInput(
            f"{option} {path}: nothing can be written in {folder} ({error.strerror}); name a file in another folder"
        ) from None
    if path.exists() and not os.access(path, os.W_OK):
        raise BadInput(f"{option} {path}: this file cannot be written (Permission denied); name another")


def write_whole(path: Path, text: str) -> None:
    """`text` in the file `path`, which is replaced in one step: a stopped run leaves the old one."""
    draft = path.with_name(f".{path.name}.part")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
