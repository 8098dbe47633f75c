"""Pages of source code without the site's navigation: it is most of the time that such a page takes to write."""

from __future__ import annotations

from collections.abc import Callable

from sphinx.application import Sphinx


def leave_navigation_out(app: Sphinx, page: str, template: str, context: dict[str, object], doctree: object) -> None:
    """Before the theme asks for the tree of all pages, give it none."""
    if page.startswith("_modules/"):
        nothing: Callable[..., str] = lambda **_: ""  # noqa: E731
        context["toctree"] = nothing


def setup(app: Sphinx) -> dict[str, bool]:
    """Runs before the theme's own handler, whose priority is 500."""
    app.connect("html-page-context", leave_navigation_out, priority=400)
    return {"parallel_read_safe": True}
