"""A directive that parses generated Markdown in place: what every table of this folder's directives is."""

from __future__ import annotations

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective


class MarkdownDirective(SphinxDirective):
    """Subclasses say in `markdown` what to parse. They import what they need there, so that Sphinx starts fast."""

    def markdown(self) -> str:
        raise NotImplementedError

    def run(self) -> list[nodes.Node]:
        container = nodes.container()
        source = f"{type(self).__module__}.{type(self).__name__}"
        self.state.nested_parse(StringList(self.markdown().splitlines(), source), 0, container)
        return list(container.children)
