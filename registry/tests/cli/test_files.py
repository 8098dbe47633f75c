"""Files that commands write: what they would destroy, and what is no file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from octavo_registry.cli.errors import BadInput
from octavo_registry.cli.files import check_writable, write_whole


def test_a_file_of_another_kind_is_not_replaced(tmp_path: Path) -> None:
    """A checkpoint that is named by mistake would be gone; a page of an earlier run, and the empty file that mktemp
    makes, are what is meant."""
    checkpoint, page, empty = tmp_path / "model.safetensors", tmp_path / "page.html", tmp_path / "tmp.Xy12"
    for path, text in ((checkpoint, "weights"), (page, "old"), (empty, "")):
        path.write_text(text)
    with pytest.raises(BadInput) as caught:
        check_writable("--html", checkpoint, "page.html")
    assert str(caught.value) == (
        f"--html {checkpoint}: this file exists and does not end in .html, so it is not replaced; name another"
    )
    assert checkpoint.read_text() == "weights"
    for path in (page, empty, tmp_path / "new"):
        check_writable("--html", path, "page.html")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_or_device_is_written_to_and_stays(tmp_path: Path) -> None:
    """`--output /dev/null` of somebody who may write in /dev put a file in its place, for every other program, too."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    check_writable("--output", pipe)
    write_whole(pipe, "ünï\n")
    assert pipe.is_fifo()
    assert os.read(reader, 99).decode() == "ünï\n"
    os.close(reader)
    assert sorted(tmp_path.iterdir()) == [pipe]


def test_a_link_is_followed(tmp_path: Path) -> None:
    """What it points to gets the text; the link stays one."""
    target, link = tmp_path / "results" / "today.json", tmp_path / "latest.json"
    target.parent.mkdir()
    target.write_text("{}")
    link.symlink_to(target)
    check_writable("--output", link)
    write_whole(link, "[]")
    assert link.is_symlink()
    assert target.read_text() == "[]"
    assert sorted(target.parent.iterdir()) == [target]
