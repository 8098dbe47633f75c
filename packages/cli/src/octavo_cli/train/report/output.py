"""The output folder: checked before training starts, written under a temporary name, and renamed at the end."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from octavo_cli.errors import InputError, RunError


@contextmanager
def output_folder(target: Path) -> Iterator[Path]:
    """A temporary folder on the target's own file system; what is written there is at `target` once the block ends.

    A new target appears by one rename. In one that exists each file is replaced by a rename and other files stay.
    After an exception nothing at `target` has changed. `InputError` before anything runs if it cannot be written.
    """
    parent = target.parent
    try:
        if target.exists() and not target.is_dir():
            raise InputError(f"--out {target}: this is a file; name a folder")
        if target.is_dir() and not os.access(target, os.W_OK | os.X_OK):
            raise InputError(f"--out {target}: cannot be written to; name another folder")
        parent.mkdir(parents=True, exist_ok=True)
        # Not TemporaryDirectory: its clean-up would fail on the folder that the rename took away.
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target if target.is_dir() else parent))
    except OSError as error:
        raise InputError(f"--out {target}: cannot be written to ({error.strerror or error})") from None
    try:
        yield staging
        try:
            _publish(staging, target)
        except OSError as error:
            raise RunError(
                f"--out {target}: the results could not be moved there ({error.strerror or error})"
            ) from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _publish(staging: Path, target: Path) -> None:
    umask = os.umask(0)
    os.umask(umask)
    if not target.exists():
        staging.chmod(0o777 & ~umask)
        staging.rename(target)
        return
    for file in sorted(staging.iterdir()):
        file.replace(target / file.name)
