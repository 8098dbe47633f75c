"""Source files lie in small folders, imports point one way, and what one part asks of another stands in its type.

`python tests/layout.py` lists every offender of every rule at once.
"""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import layout
import pytest
from source_tree import Tree


@pytest.mark.parametrize("rule", layout.offenders())
def test_the_rules_of_the_house_hold(rule: str) -> None:
    """A newcomer finds a file from folder names alone, and changes one folder without reading the others."""
    offenders = layout.offenders()[rule]
    if offenders:
        pytest.fail(f"{rule}; {len(offenders)} offenders:\n" + "\n".join(offenders), pytrace=False)


# Each rule sees a fault that is planted in a package of its own.


def _package(folder: Path, files: dict[str, str], name: str = "octavo_torch") -> Tree:
    for path, text in files.items():
        file = folder / name / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(dedent(text))
    return Tree.from_files(name, folder / name, sorted((folder / name).rglob("*")), (folder / name / "include",))


def test_a_wide_folder_is_seen(tmp_path: Path) -> None:
    """Seventeen files are one too many, whatever their language; __init__.py, stubs and markers do not count."""
    exact = {f"folder/file{number}.cu": "" for number in range(layout.MOST_FILES)}
    marks = {"folder/__init__.py": "", "folder/py.typed": "", "folder/_stub.pyi": ""}
    assert not list(layout.wide_folders(_package(tmp_path, exact | marks)))
    (line,) = layout.wide_folders(_package(tmp_path, {"folder/one_more.cuh": ""}))
    assert line.startswith("octavo_torch/folder has 17 source files")


@pytest.mark.parametrize(
    "back",
    [
        "from octavo_torch.a import x\n",
        "from octavo_torch import a\n",
        "import octavo_torch.a\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from octavo_torch.a import x\n",
        "def late():\n    from octavo_torch.a import x\n    return x\n",
        "from importlib import import_module\nx = import_module('octavo_torch.a')\n",
    ],
)
def test_a_circle_is_seen(tmp_path: Path, back: str) -> None:
    """A circle is one at the top of a file, for a type checker, and in a function alike."""
    files = {
        "a.py": "from octavo_torch.folder import b\n",
        "folder/__init__.py": "",
        "folder/b.py": "from octavo_torch import c",
    }
    assert not list(layout.import_circles(_package(tmp_path, files | {"c.py": "x = 1\n"})))
    source = _package(tmp_path / "circle", files | {"c.py": back})
    assert list(layout.import_circles(source)) == ["octavo_torch: a.py -> folder/b.py -> c.py -> a.py"]


def test_a_plugin_may_load_its_backend_late(tmp_path: Path) -> None:
    """The registry calls `octavo_load` when a backend is first used, and the backend may read the card."""
    late = "def octavo_load(name):\n    from octavo_torch import backend\n    return backend\n"
    files = {"backend.py": "from octavo_torch import plugin\n", "plugin.py": late}
    assert not list(layout.import_circles(_package(tmp_path, files)))
    early = files | {"plugin.py": "from octavo_torch import backend\n"}
    assert list(layout.import_circles(_package(tmp_path / "early", early)))


def test_an_upward_import_is_seen(tmp_path: Path) -> None:
    """A lower folder, and any folder below the modules that lie on top, knows nothing of what is above it."""
    files = {
        "low/a.py": "x = 1\n",
        "high/b.py": "from octavo_torch.low import a\nfrom octavo_torch.high import c\n",
        "high/c.py": "",
        "errors.py": "",
        "top.py": "from octavo_torch.high.b import a\nfrom octavo_torch.low.a import x\n",
    }
    order = ("errors", "low", "high")
    assert not list(layout.upward_imports(_package(tmp_path, files), order))
    for place, target in (("low/a.py", "high/c.py"), ("high/c.py", "top.py"), ("errors.py", "low/a.py")):
        module = target.removesuffix(".py").replace("/", ".")
        source = _package(tmp_path / place, files | {place: f"import octavo_torch.{module}\n"})
        message = f"octavo_torch: {place} imports {target}, which lies above it"
        assert list(layout.upward_imports(source, order)) == [message]


def test_a_folder_without_a_place_is_seen(tmp_path: Path) -> None:
    """Whoever makes a folder says what it lies on, and whoever removes one takes its place along."""
    source = _package(tmp_path, {"low/a.py": "", "new/b.py": "", "top.py": ""})
    lines = list(layout.upward_imports(source, ("low", "gone")))
    assert lines == [
        "octavo_torch: LEVELS names gone, of which there is no file",
        "octavo_torch/new has no place in LEVELS",
    ]


def test_an_upward_include_is_seen(tmp_path: Path) -> None:
    """Includes are followed from the file's own folder and from the include path, and circles of headers are seen."""
    files = {
        "include/octavo/types.h": "",
        "lib/common/check.h": '#include "octavo/types.h"\n',
        "lib/cuda/gemm/gemm.cuh": '#include "../../common/check.h"\n#  include "tile.cuh"\n',
        "lib/cuda/gemm/tile.cuh": "#include <vector>\n",
    }
    order = ("include/octavo", "lib/common", "lib/cuda/gemm")
    source = _package(tmp_path, files, "native")
    assert not [*layout.upward_imports(source, order), *layout.import_circles(source)]
    up = {"lib/common/check.h": '#include "../cuda/gemm/tile.cuh"\n', "lib/cuda/gemm/tile.cuh": '#include "gemm.cuh"\n'}
    source = _package(tmp_path / "up", files | up, "native")
    message = "native: lib/common/check.h imports lib/cuda/gemm/tile.cuh, which lies above it"
    assert list(layout.upward_imports(source, order)) == [message]
    assert len(list(layout.import_circles(source))) == 1


NINE = "a, b, c, d, e, /, f, *, g, h, i"
EIGHT = "a, b, c, d, e, /, f, *, g, h"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (f"def run({EIGHT}): pass", ""),
        (f"def run({NINE}): pass", "octavo_torch/inner.py:1 run takes 9 parameters"),
        (f"async def run({NINE}): pass", "octavo_torch/inner.py:1 run takes 9 parameters"),
        ("def run(a, b, c, d, e, f, g, *rest, **more): pass", "octavo_torch/inner.py:1 run takes 9 parameters"),
        (f"class Call:\n    def run(self, {NINE}): pass", "octavo_torch/inner.py:2 Call.run takes 9 parameters"),
        (f"class Call:\n    def run(self, {EIGHT}): pass", ""),
        (f"class Call:\n    def other(self, {NINE}): pass", "octavo_torch/inner.py:2 Call.other takes 9 parameters"),
        (f"def outer():\n    def run({NINE}): pass", "octavo_torch/inner.py:2 outer().run takes 9 parameters"),
        (f"class F(torch.autograd.Function):\n    def forward(ctx, {NINE}): pass", ""),
        (
            f"class F(torch.autograd.Function):\n    def run(ctx, {NINE}): pass",
            "octavo_torch/inner.py:2 F.run takes 10",
        ),
        (f"@app.command('run')\ndef run({NINE}): pass", ""),
        (f"def act({NINE}): pass", ""),  # the package's public function is defined there
        (f"class Act:\n    def act(self, {NINE}): pass", "octavo_torch/inner.py:2 Act.act takes 9 parameters"),
        (f"class Contract:\n    def serve(self, {NINE}, last): pass", ""),  # as the public protocol has it
    ],
)
def test_a_wide_signature_is_seen(tmp_path: Path, text: str, named: str) -> None:
    """More than eight values that travel together are a type that nobody wrote down; what users call is excepted."""
    package = {
        "__init__.py": "from octavo_torch.inner import act\nfrom octavo_torch.public import Layer\n"
        "__all__ = ['Layer', 'act']\n",
        "public.py": f"class Layer:\n    def __init__(self, {NINE}): pass\n    def _hidden(self, {EIGHT}): pass\n",
        "plugin_api.py": f"def shared({NINE}): pass\nclass Serves:\n    def serve(self, {NINE}, last): pass\n",
        "inner.py": text,
    }
    lines = list(layout.wide_signatures([_package(tmp_path, package)], {"octavo_torch": ("plugin_api",)}))
    assert len(lines) == bool(named)
    assert all(line.startswith(named) for line in lines)


def test_private_methods_of_public_classes_are_not_public(tmp_path: Path) -> None:
    """Users call what has no underscore; without PUBLIC_MODULES a module's names are the package's own affair."""
    package = {
        "__init__.py": "from octavo_torch.public import Layer\n__all__ = ['Layer']\n",
        "public.py": f"class Layer:\n    def _hidden(self, {NINE}): pass\n",
        "plugin_api.py": f"def shared({NINE}): pass\n",
    }
    lines = list(layout.wide_signatures([_package(tmp_path, package)], {}))
    assert [line.split()[1] for line in lines] == ["shared", "Layer._hidden"]


@pytest.mark.parametrize(
    ("call", "is_one"),
    [
        ("inspect.signature(run)", True),
        ("dict(locals())", True),
        ("hasattr(run, 'from_plain')", True),
        ("hasattr(run, 'slots')", True),
        ("hasattr(array, 'tolist')", False),
        ("run.from_plain", False),
    ],
)
def test_a_question_at_run_time_is_seen(tmp_path: Path, call: str, is_one: bool) -> None:
    """A protocol of ours is a type that mypy checks on both sides; a library's objects are no types of ours."""
    protocol = "class Quantize:\n    slots: int\n    def from_plain(self): pass\n"
    source = _package(tmp_path, {"a.py": f"{protocol}x = {call}\n"})
    lines = list(layout.questions_at_run_time(source, layout.attributes([source])))
    assert bool(lines) == is_one


def test_golden_signatures_are_no_questions(tmp_path: Path) -> None:
    """The file that writes the hooks' signatures down has to read them."""
    source = _package(tmp_path, {"api_level.py": "x = inspect.signature(y)\n"})
    assert not list(layout.questions_at_run_time(source, set()))


def test_lines_with_any_are_counted(tmp_path: Path) -> None:
    """A line counts once, an import and a comment do not."""
    text = "from typing import Any  # Any\ndef run(a: Any, b: list[Any]) -> int: return 1\nx: Any = 1\n"
    assert list(layout.lines_with_any(_package(tmp_path, {"a.py": text}))) == [
        "octavo_torch/a.py:2",
        "octavo_torch/a.py:3",
    ]


@pytest.mark.parametrize(
    ("line", "is_another_door"),
    [
        ("from octavo_torch.plugin_api import GroupedTensor", False),
        ("from octavo_torch import plugin_api", False),
        ("import octavo_torch.plugin_api", False),
        ("from octavo_registry import Refused", False),
        ("from octavo_registry.contract import Fprop", False),
        ("from octavo import Recipe", False),
        ("import torch", False),
        ("from octavo_torch import GroupedTensor", True),
        ("from octavo_torch.reference import ops", True),
        ("import octavo_torch", True),
        ("from octavo_registry import cli", True),
        ("from octavo_registry.cli.why import why", True),
        ("def late():\n    from octavo_torch.status import status_word", True),
    ],
)
def test_another_door_is_seen(tmp_path: Path, line: str, is_another_door: bool) -> None:
    """A third party's plugin can do whatever ours do, for ours take the same two doors."""
    source = _package(tmp_path, {"backend.py": line + "\n"}, "acme_octavo")
    assert bool(list(layout.other_doors(source, layout.DOORS))) == is_another_door


def test_the_report_lists_every_offender(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One command shows an engineer all that is still to be done; its exit status says whether anything is."""

    def some() -> dict[str, list[str]]:
        return {"first rule": [], "second rule": ["a.py", "b.py"]}

    monkeypatch.setattr(layout, "offenders", some)
    assert layout.main() == 1
    assert capsys.readouterr().out == "ok  first rule\nRED (2)  second rule\n    a.py\n    b.py\n"
