"""Tables of the faults that were seen elsewhere, from the conformance suite's own list.

`{faults}`: all of them. `{native-faults}`, `{front-end-faults}`: those that tests of the native packages, or of the
front ends, name. `{faults-and-tests}` of `scoreboard` is every fault with the tests of all packages.
"""

from __future__ import annotations

from pathlib import Path

from markdown_directive import MarkdownDirective
from sphinx.application import Sphinx

ROOT = Path(__file__).parents[2]
NATIVE_TESTS = (
    "native/tests", "packages/torch-native/tests", "packages/torch-cudagraph/tests", "packages/jax-native/tests",
)  # fmt: skip

FRONT_END_TESTS = ("packages/torch/tests", "packages/jax/tests")


def packages_markdown(folders: tuple[str, ...]) -> str:
    """One line per fault that a test in these folders names."""
    from octavo_conformance.faults import faults, named_by_tests

    files = [file for folder in folders for file in sorted((ROOT / folder).rglob("test_*.py"))]
    named = named_by_tests(files)
    lines = ["| # | fault | tests |", "|---|---|---|"]
    for row in faults():
        tests = [f"`{file.relative_to(ROOT).as_posix()}::{name}`" for file, name in named.get(row.number, ())]
        if tests:
            lines.append(f"| {row.number} | {row.fault} | {', '.join(tests)} |")
    return "\n".join(lines) + "\n"


class FaultTable(MarkdownDirective):
    """Every fault, and the test of the conformance suite that would catch it."""

    def markdown(self) -> str:
        from octavo_conformance.faults import markdown

        return markdown()


class NativeFaultTable(MarkdownDirective):
    """The faults that tests of the native packages name."""

    def markdown(self) -> str:
        return packages_markdown(NATIVE_TESTS)


class FrontEndFaultTable(MarkdownDirective):
    """The faults that tests of the front ends name."""

    def markdown(self) -> str:
        return packages_markdown(FRONT_END_TESTS)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("faults", FaultTable)
    app.add_directive("native-faults", NativeFaultTable)
    app.add_directive("front-end-faults", FrontEndFaultTable)
    return {"parallel_read_safe": True}
