"""Which functions take how many parameters, and whose signatures are public."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from source_tree import Tree, imported_modules, parse

Function = ast.FunctionDef | ast.AsyncFunctionDef
AUTOGRAD = ("forward", "backward", "setup_context", "jvp", "vmap")
"""Methods of torch.autograd.Function, which receive each tensor as an argument of its own."""
KERNELS = ("triton.jit", "gluon.jit", "device_function")
"""Decorators of what Triton compiles: each pointer, stride and constant is a parameter of its own."""


@dataclass(frozen=True)
class Signature:
    """One function: its file, its class ("" for a module's function) with the names of the bases, its parameters."""

    file: Path
    owner: str
    bases: tuple[str, ...]
    name: str
    line: int
    parameters: tuple[str, ...]
    is_command: bool
    is_kernel: bool

    @property
    def is_autograd(self) -> bool:
        return self.name in AUTOGRAD and any(base.endswith("Function") for base in self.bases)


def signatures(file: Path) -> Iterator[Signature]:
    """Every function of a file, methods and inner functions included; `self` and `cls` do not count."""
    yield from _below(file, parse(file), "", ())


def _below(file: Path, node: ast.AST, owner: str, bases: tuple[str, ...]) -> Iterator[Signature]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from _below(file, child, child.name, tuple(_last_name(base) for base in child.bases))
        elif isinstance(child, Function):
            command = any(".command(" in ast.unparse(decorator) for decorator in child.decorator_list)
            kernel = any(ast.unparse(decorator) in KERNELS for decorator in child.decorator_list)
            yield Signature(file, owner, bases, child.name, child.lineno, _parameters(child), command, kernel)
            yield from _below(file, child, f"{child.name}()", ())
        else:
            yield from _below(file, child, owner, bases)


def _parameters(function: Function) -> tuple[str, ...]:
    arguments = function.args
    stars = [argument for argument in (arguments.vararg, arguments.kwarg) if argument is not None]
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *stars)]
    return tuple(names[1:] if names[:1] in (["self"], ["cls"]) else names)


def _last_name(base: ast.expr) -> str:
    """`Function` of `torch.autograd.Function`; `Base` of `Base[T]`."""
    return ast.unparse(base).partition("[")[0].rpartition(".")[2]


def public_names(tree: Tree, modules: tuple[str, ...]) -> set[tuple[Path, str]]:
    """(file, name) of what the `__all__` of these modules lists, where it is defined.

    A module without `__all__` makes every name of its own public that has no underscore. A name that a module imports
    from a file of the tree is followed there.
    """
    result = set()
    for module in modules:
        file = _file_of(tree, module)
        if file is not None:
            result |= {_defined(tree, file, name) for name in _listed(file)}
    return result


def _listed(file: Path) -> list[str]:
    for node in parse(file).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(ast.unparse(target) == "__all__" for target in targets):
            assert isinstance(node, ast.Assign)
            return [str(name) for name in ast.literal_eval(node.value)]
    own = (node.name for node in parse(file).body if isinstance(node, ast.ClassDef | Function))
    return [name for name in own if not name.startswith("_")]


def _file_of(tree: Tree, module: str) -> Path | None:
    """The file of a module that is named from the package on: "" is the package itself."""
    base = tree.folder.joinpath(*module.split(".")) if module else tree.folder
    for file in (base.with_suffix(".py"), base / "__init__.py"):
        if file in tree.files:
            return file
    return None


def _defined(tree: Tree, file: Path, name: str) -> tuple[Path, str]:
    for module, imported in imported_modules(file):
        if imported == name and module.startswith(f"{tree.name}.") and not name.startswith("_"):
            target = _file_of(tree, module.removeprefix(f"{tree.name}."))
            if target is not None and target != file:
                return _defined(tree, target, name)
    return file, name


def is_public(signature: Signature, public: set[tuple[Path, str]]) -> bool:
    """A public function, or a method of a public class that users may call or override."""
    if signature.owner:
        callable_by_users = signature.name in ("__init__", "__new__", "__call__") or not signature.name.startswith("_")
        return callable_by_users and (signature.file, signature.owner) in public
    return (signature.file, signature.name) in public
