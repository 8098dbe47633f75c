"""`{scoreboard}`: what was measured and when; `{faults-and-tests}`: each fault seen elsewhere with all its tests."""

from __future__ import annotations

from docutils import nodes
from docutils.statemachine import StringList
from fault_table import FaultTable
from sphinx.application import Sphinx
from sphinx.util.nodes import nested_parse_with_titles


class Scoreboard(FaultTable):
    """Parse `scoreboard_rows.markdown()` in place, with its headings."""

    def run(self) -> list[nodes.Node]:
        from scoreboard_rows import markdown

        section = nodes.section()
        section.document = self.state.document
        nested_parse_with_titles(self.state, StringList(markdown().splitlines(), "scoreboard"), section)
        return list(section.children)


class FaultsAndTests(FaultTable):
    """Parse `scoreboard_rows.faults_markdown()` in place."""

    def markdown(self) -> str:
        from scoreboard_rows import faults_markdown

        return faults_markdown()


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("scoreboard", Scoreboard)
    app.add_directive("faults-and-tests", FaultsAndTests)
    return {"parallel_read_safe": True}
