"""`{scoreboard}`: what was measured and when; `{faults-and-tests}`: each fault seen elsewhere with all its tests."""

from __future__ import annotations

from docutils import nodes
from docutils.statemachine import StringList
from markdown_directive import MarkdownDirective
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import nested_parse_with_titles


class Scoreboard(SphinxDirective):
    """The tables of `scoreboard_rows` under their headings, which only a section may hold."""

    def run(self) -> list[nodes.Node]:
        from scoreboard_rows import markdown

        section = nodes.section()
        section.document = self.state.document
        nested_parse_with_titles(self.state, StringList(markdown().splitlines(), "scoreboard"), section)
        return list(section.children)


class FaultsAndTests(MarkdownDirective):
    """Every fault with the tests of all packages that name it."""

    def markdown(self) -> str:
        from scoreboard_rows import faults_markdown

        return faults_markdown()


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("scoreboard", Scoreboard)
    app.add_directive("faults-and-tests", FaultsAndTests)
    return {"parallel_read_safe": True}
