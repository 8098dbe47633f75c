"""`{demotions}`: which plan serves a grouped linear layer of torch, eagerly and in a CUDA graph."""

from __future__ import annotations

from fault_table import FaultTable
from sphinx.application import Sphinx


class Demotions(FaultTable):
    """Parse `demotion_rows.markdown()` in place."""

    def markdown(self) -> str:
        from demotion_rows import markdown

        return markdown()


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("demotions", Demotions)
    return {"parallel_read_safe": True}
