"""Text to train on that is there wherever Python is: the sources of its standard library."""

from __future__ import annotations

import platform
import sysconfig
from pathlib import Path

from octavo_cli.train.data import Corpus, corpus_of

LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3", "ensurepip", "idlelib"}
)
"""Folders that are not part of the library, or that distributions leave out."""


def library(root: Path | None = None) -> bytes:
    """All modules under `root`, by default of this Python's library, in the order of their names."""
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    files = (file.relative_to(root) for file in root.rglob("*.py"))
    chosen = sorted(file.as_posix() for file in files if not LEFT_OUT & set(file.parts))
    return b"\n\n".join((root / name).read_bytes() for name in chosen)


def read_text(path: Path | None, context: int) -> Corpus:
    """The corpus of a file, or of the standard library; its sha256 tells one Python's text from another's."""
    if path is not None:
        return corpus_of(path.name, path.read_bytes(), context)
    return corpus_of(f"standard library of Python {platform.python_version()}", library(), context)
