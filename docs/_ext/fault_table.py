"""`{faults}`: the table of faults seen elsewhere, from the conformance suite's own list."""

from __future__ import annotations

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


class FaultTable(SphinxDirective):
    """Parse `octavo_conformance.faults.markdown()` in place."""

    def run(self) -> list[nodes.Node]:
        from octavo_conformance.faults import markdown

        container = nodes.container()
        self.state.nested_parse(StringList(markdown().splitlines(), "octavo_conformance.faults"), 0, container)
        return list(container.children)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("faults", FaultTable)
    return {"parallel_read_safe": True}
