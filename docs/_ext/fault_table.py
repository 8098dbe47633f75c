"""`{faults}`: the table of faults seen elsewhere, from the conformance suite's own list.

`{native-faults}`, `{front-end-faults}`: the tests of the native packages, and of the front ends, that name rows of it.
"""

from __future__ import annotations

from pathlib import Path

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).parents[2]
NATIVE_TESTS = (
    "native/tests", "packages/torch-native/tests", "packages/torch-cudagraph/tests", "packages/jax-native/tests",
)  # fmt: skip

FRONT_END_TESTS = ("packages/torch/tests", "packages/jax/tests")


def packages_markdown(folders: tuple[str, ...]) -> str:
    """A line a row of the faults that packages' own tests name."""
    from octavo_conformance.faults import faults, named_by_tests

    files = [file for folder in folders for file in sorted((ROOT / folder).rglob("test_*.py"))]
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
    """Parse the native packages' rows in place."""

    def markdown(self) -> str:
        return packages_markdown(NATIVE_TESTS)


class FrontEndFaultTable(FaultTable):
    """Parse the front ends' rows in place."""

    def markdown(self) -> str:
        return packages_markdown(FRONT_END_TESTS)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("faults", FaultTable)
    app.add_directive("native-faults", NativeFaultTable)
    app.add_directive("front-end-faults", FrontEndFaultTable)
    return {"parallel_read_safe": True}
