"""The development tasks: what plain `nox` runs."""

from __future__ import annotations

import ast

from workspace import ROOT, packages

NOXFILE = ast.parse((ROOT / "noxfile.py").read_text())


def _function(name: str) -> ast.FunctionDef:
    (function,) = [node for node in NOXFILE.body if isinstance(node, ast.FunctionDef) and node.name == name]
    return function


def _value(name: str) -> object:
    (node,) = [each for each in NOXFILE.body if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == name]
    return ast.literal_eval(node.value)


def test_every_session_belongs_to_a_change_or_says_that_it_does_not() -> None:
    """A session that somebody adds is part of `nox`, unless it has `default=False`."""
    text = ast.unparse(_function("_checks"))
    for function in (node for node in NOXFILE.body if isinstance(node, ast.FunctionDef)):
        decorators = [ast.unparse(decorator) for decorator in function.decorator_list]
        is_session = any(decorator.startswith("nox.session") for decorator in decorators)
        if is_session and function.name != "change" and not any("default=False" in each for each in decorators):
            assert f"'{function.name}'" in text or f"f'{function.name}(" in text, (
                f"_checks() does not name {function.name}"
            )


def test_every_package_has_its_sessions() -> None:
    """A package that the noxfile does not know is never tested."""
    directories = _value("DIRECTORIES")
    assert directories == {name: str(package.directory.relative_to(ROOT)) for name, package in packages().items()}
