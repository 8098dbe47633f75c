"""The page of the `octavo` command names each command, and each benchmark."""

from __future__ import annotations

import re

from workspace import ROOT

from octavo_bench.command import BENCHMARKS
from octavo_registry.cli.commands import BUILT_IN, OWN


def test_the_table_has_every_command() -> None:
    """Whoever looks for what there is reads one table."""
    rows = re.findall(r"^\| (`octavo .*?) \|", (ROOT / "docs/guide/command.md").read_text(), flags=re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(?:octavo )?(\w+)", row)}
    wanted = {*BUILT_IN, *(name for name in OWN if name != "bench")}
    assert wanted - named == set()
    timed = {name for row in rows if "octavo bench" in row for name in re.findall(r"`(?:octavo bench )?(\w+)`", row)}
    assert timed == {benchmark.name for benchmark in BENCHMARKS}
