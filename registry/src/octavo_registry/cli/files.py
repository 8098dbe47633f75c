"""Files that commands write: checked before the work, and written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from octavo_registry.cli.errors import BadInput


def check_writable(option: str, path: Path, example: str = "results.json") -> None:
    """`BadInput` where `path`, the value of `option`, could not be written after the work. Leaves nothing behind.

    A file that has something in it and does not end as `example` does is another one than is meant, such as the
    checkpoint that a page is about: `BadInput`, too.
    """
    suffix = Path(example).suffix
    if path.is_dir():
        raise BadInput(f"{option} {path}: this is a folder; name a file such as {path / example}")
    if path.is_file() and path.suffix != suffix and path.stat().st_size:
        raise BadInput(
            f"{option} {path}: this file exists and does not end in {suffix}, so it is not replaced; name another"
        )
    if not _is_written_to(path):
        _check_folder(option, path)
    if path.exists() and not os.access(path, os.W_OK):
        raise BadInput(f"{option} {path}: this file cannot be written (Permission denied); name another")


def _is_written_to(path: Path) -> bool:
    """Whether `path` is a device or a pipe, such as /dev/null, in whose place there can be no file."""
    return path.exists() and not path.is_file()


def _check_folder(option: str, path: Path) -> None:
    folder = path.resolve().parent
    if not folder.is_dir():
        raise BadInput(f"{option} {path}: there is no folder {folder}; create it or name another")
    try:
        with tempfile.NamedTemporaryFile(prefix=f".{path.name}.", dir=folder):
            pass
    except OSError as error:
        raise BadInput(
            f"{option} {path}: nothing can be written in {folder} ({error.strerror}); name a file in another folder"
        ) from None


def write_whole(path: Path, text: str) -> None:
    """`text` in the file `path`, which is replaced in one step: a stopped run leaves the old one.

    A link stays one: what it points to is replaced. A device or a pipe is written to.
    """
    if _is_written_to(path):
        path.write_text(text, encoding="utf-8")
        return
    path = path.resolve()
    draft = path.with_name(f".{path.name}.part")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
