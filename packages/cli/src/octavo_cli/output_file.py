"""Files that commands write: checked before the work, and written beside their place and moved there."""

from __future__ import annotations

import os
from pathlib import Path

from octavo_cli.errors import InputError


def writable(option: str, path: Path) -> None:
    """InputError where no file can be written at `path`."""
    folder = path.parent
    if path.is_dir():
        raise InputError(f"{option} {path}: this is a folder; name a file")
    if not folder.is_dir():
        raise InputError(f"{option} {path}: there is no folder {folder}; make it, or name another file")
    if not os.access(folder, os.W_OK | os.X_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise InputError(f"{option} {path}: cannot be written to; name another file")
    draft = _draft(path)
    try:
        draft.touch()
        draft.unlink()
    except OSError as error:
        raise InputError(f"{option} {path}: cannot be written to ({error.strerror}); name another file") from None


def write_text(path: Path, text: str) -> None:
    """`text` at `path`, whole or not at all."""
    draft = _draft(path)
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def _draft(path: Path) -> Path:
    return path.with_name(f".{path.name}.part")
