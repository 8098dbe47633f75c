"""`{demotions}`: which plan serves a grouped linear layer of torch, eagerly and in a CUDA graph."""

from __future__ import annotations

from markdown_directive import MarkdownDirective
from sphinx.application import Sphinx


class Demotions(MarkdownDirective):
    """The table of `demotion_rows`."""

    def markdown(self) -> str:
        from demotion_rows import markdown

        return markdown()


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("demotions", Demotions)
    return {"parallel_read_safe": True}
