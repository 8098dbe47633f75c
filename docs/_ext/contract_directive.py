"""`{contract} NAME`: one of the tables in `contract_tables`."""

from __future__ import annotations

from markdown_directive import MarkdownDirective
from sphinx.application import Sphinx


class ContractTable(MarkdownDirective):
    """The table that is named."""

    required_arguments = 1

    def markdown(self) -> str:
        from contract_tables import markdown

        return markdown(self.arguments[0])


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("contract", ContractTable)
    return {"parallel_read_safe": True}
