"""The source files of one package as a graph: which file imports, or includes, which."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SUFFIXES = (".py", ".h", ".cuh", ".cpp", ".cu")
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', flags=re.MULTILINE)


@cache
def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(), str(file))


@cache
def nodes(file: Path) -> tuple[ast.AST, ...]:
    """Every node of the file. The rules walk the same files a dozen times."""
    return tuple(ast.walk(parse(file)))


@dataclass(frozen=True)
class Tree:
    """Source files below one folder.

    name           the import name of a Python package; a name for people where the files are C++
    folder         the package itself, or the folder that holds every C++ file
    files          every source file below `folder`
    include_paths  folders in which #include looks after the including file's own
    """

    name: str
    folder: Path
    files: tuple[Path, ...]
    include_paths: tuple[Path, ...] = ()

    def relative(self, file: Path) -> str:
        return file.relative_to(self.folder).as_posix()

    @classmethod
    def from_files(cls, name: str, folder: Path, files: list[Path], include_paths: tuple[Path, ...] = ()) -> Tree:
        """The tree of those of these files that are source."""
        return cls(name, folder, tuple(file for file in files if file.suffix in SUFFIXES), include_paths)

    def module(self, file: Path) -> str:
        """The name under which Python imports the file."""
        parts = [self.name, *file.relative_to(self.folder).with_suffix("").parts]
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def has_folders(self) -> bool:
        return any(file.parent != self.folder for file in self.files)

    @property
    def python(self) -> tuple[Path, ...]:
        return tuple(file for file in self.files if file.suffix == ".py")


@cache
def imported_modules(file: Path, *, inside_functions: bool = True) -> tuple[tuple[str, str], ...]:
    """(module, name) of each import statement; name is "" for `import module`.

    An import counts wherever it stands: at the top, under TYPE_CHECKING, in a function. A reader who follows it does
    not care when it runs. `import_module("...")` with a literal counts as well.
    """
    return tuple(_imports(nodes(file) if inside_functions else _outside_functions(parse(file))))


def _imports(statements: Iterable[ast.AST]) -> Iterator[tuple[str, str]]:
    for node in statements:
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
            argument = node.args[0]
            if isinstance(argument, ast.Constant):
                yield str(argument.value), ""


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
            yield from _outside_functions(child)


@cache
def edges(tree: Tree) -> dict[Path, tuple[Path, ...]]:
    """The tree's own files that each file imports or includes.

    `from package.room import name` leads to the file room/name.py where there is one, else to room.py or
    room/__init__.py. A plugin.py loads its backend inside a function, when the registry asks for it: those imports
    alone are left out, for the backend may read the card.
    """
    python = {tree.module(file): file for file in tree.python}
    result = {}
    for file in tree.files:
        targets: set[Path | None]
        if file.suffix == ".py":
            names = imported_modules(file, inside_functions=file.name != "plugin.py")
            targets = {python.get(f"{module}.{name}") or python.get(module) for module, name in names}
        else:
            targets = {_included(tree, file, name) for name in INCLUDE.findall(file.read_text())}
        result[file] = tuple(sorted(target for target in targets if target is not None and target != file))
    return result


def _included(tree: Tree, file: Path, name: str) -> Path | None:
    for folder in (file.parent, *tree.include_paths):
        target = (folder / name).resolve()
        if target in _resolved(tree):
            return _resolved(tree)[target]
    return None


@cache
def _resolved(tree: Tree) -> dict[Path, Path]:
    return {file.resolve(): file for file in tree.files}


def circles(graph: dict[Path, tuple[Path, ...]]) -> list[list[Path]]:
    """One shortest circle through each group of files that can all reach each other."""
    reached = {file: _reachable(graph, file) for file in graph}
    remaining = {file for file in graph if file in reached[file]}
    result = []
    while remaining:
        start = min(remaining)
        group = {file for file in remaining if file in reached[start] and start in reached[file]}
        remaining -= group
        result.append(min((_circle_through(graph, file) for file in sorted(group)), key=len))
    return result


def _reachable(graph: dict[Path, tuple[Path, ...]], start: Path) -> set[Path]:
    reached: set[Path] = set()
    queue = [start]
    while queue:
        for target in graph.get(queue.pop(), ()):
            if target not in reached:
                reached.add(target)
                queue.append(target)
    return reached


def _circle_through(graph: dict[Path, tuple[Path, ...]], start: Path) -> list[Path]:
    """A shortest way from `start` back to itself, which there must be."""
    ways = [[start]]
    visited: set[Path] = set()
    for way in ways:
        for target in graph.get(way[-1], ()):
            if target == start:
                return [*way, start]
            if target not in visited:
                visited.add(target)
                ways.append([*way, target])
    raise AssertionError(f"{start} lies on no circle")
