"""`{contract} NAME`: a table of `contract_tables`."""

from __future__ import annotations

from fault_table import FaultTable
from sphinx.application import Sphinx


class ContractTable(FaultTable):
    """Parse `contract_tables.markdown(NAME)` in place."""

    required_arguments = 1

    def markdown(self) -> str:
        from contract_tables import markdown

        return markdown(self.arguments[0])


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("contract", ContractTable)
    return {"parallel_read_safe": True}
