"""`{faults}`: the table of faults seen elsewhere, from the conformance suite's own list.

`{native-faults}`: the tests of the native packages that name rows of it.
"""

from __future__ import annotations

from pathlib import Path

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).parents[2]
NATIVE_TESTS = ("native/tests", "packages/torch-native/tests", "packages/jax-native/tests")


def native_markdown() -> str:
    """A line a row of the faults that a native package's own tests name."""
    from octavo_conformance.faults import faults, named_by_tests

    files = [file for folder in NATIVE_TESTS for file in sorted((ROOT / folder).glob("test_*.py"))]
    named = named_by_tests(files)
    lines = ["| # | fault | tests |", "|---|---|---|"]
    for row in faults():
        tests = [f"`{file.relative_to(ROOT).as_posix()}::{name}`" for file, name in named.get(row.number, ())]
        if tests:
            lines.append(f"| {row.number} | {row.fault} | {', '.join(tests)} |")
    return "\n".join(lines) + "\n"


class FaultTable(SphinxDirective):
    """Parse `octavo_conformance.faults.markdown()` in place."""

    def markdown(self) -> str:
        from octavo_conformance.faults import markdown

        return markdown()

    def run(self) -> list[nodes.Node]:
        container = nodes.container()
        self.state.nested_parse(StringList(self.markdown().splitlines(), "octavo_conformance.faults"), 0, container)
        return list(container.children)


class NativeFaultTable(FaultTable):
    """Parse `native_markdown()` in place."""

    def markdown(self) -> str:
        return native_markdown()


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("faults", FaultTable)
    app.add_directive("native-faults", NativeFaultTable)
    return {"parallel_read_safe": True}
