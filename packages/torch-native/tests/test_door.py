"""What this package imports of the front end."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import octavo_torch
import octavo_torch_native
from octavo_torch import plugin_api


def imports_of_the_front_end() -> Iterator[tuple[str, str, str]]:
    """(file, module, name) of each; the name is empty for `import module`."""
    folder = Path(octavo_torch_native.__file__).parent
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                found = [(alias.name, "") for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                found = [(node.module or "", alias.name) for alias in node.names]
            else:
                continue
            for module, name in found:
                if module.split(".")[0] == "octavo_torch":
                    yield str(file.relative_to(folder)), module, name


def test_the_front_end_has_one_door() -> None:
    """`octavo_torch.plugin_api` and public names: other modules of the front end, a backend's among them, may move."""
    imported = list(imports_of_the_front_end())
    public = {"octavo_torch": octavo_torch.__all__, "octavo_torch.plugin_api": plugin_api.__all__}
    assert not [entry for entry in imported if entry[2] not in public.get(entry[1], ())]
    assert len({name for _, module, name in imported if module == "octavo_torch.plugin_api"}) > 10
