"""The API pages that group names by task leave none out."""

from __future__ import annotations

import importlib
import re
from types import ModuleType

import pytest
from workspace import ROOT, tracked

BLOCK = re.compile(r"^```\{api\} ([\w.]+)\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
GROUPED = {
    path.stem: names
    for path in tracked("docs/reference/api/*.md")
    if (names := [name for _, block in BLOCK.findall(path.read_text()) for name in block.split()])
}


@pytest.mark.parametrize("module", GROUPED)
def test_every_public_name_has_its_place(module: str) -> None:
    """A new public name is on its page once, below the heading of its task."""
    exported = importlib.import_module(module)
    public = {name for name in exported.__all__ if not isinstance(getattr(exported, name), ModuleType)}
    listed = GROUPED[module]
    page = f"docs/reference/api/{module}.md"
    assert sorted(public - {*listed}) == [], f"{page}: list these names below the heading of their task"
    assert sorted(listed) == sorted(public), f"{page}: list each name of __all__ once, and no other"


def test_every_page_is_in_the_index() -> None:
    """A page that the index lacks is found by nobody."""
    folder = ROOT / "docs" / "reference" / "api"
    index = (folder / "index.md").read_text()
    toctrees = " ".join(re.findall(r"```\{toctree\}(.*?)```", index, flags=re.DOTALL)).split()
    assert {path.stem for path in folder.glob("*.md")} - {"index"} <= {*toctrees}
