"""Each package stands alone: its version, changelog, marker of types, licence."""

from __future__ import annotations

import ast
import importlib
import inspect
import re

import pytest
from workspace import ROOT, packages, tracked

from octavo_registry.contract import OPERATIONS
from octavo_registry.discovery.install import LACKING, PACKAGES

every_package = pytest.mark.parametrize("name", sorted(packages()))


@every_package
def test_a_package_is_complete(name: str) -> None:
    """Whoever opens one package finds what it is, what changed, its tests, and types that checkers read."""
    package = packages()[name]
    assert (package.source / "py.typed").exists()
    assert tracked("tests/**/test_*.py", root=package.directory)
    assert package.project["license"] == "Apache-2.0"
    assert package.project["requires-python"] == ">=3.11"
    assert (package.directory / "README.md").stat().st_size > 100
    assert f"## {package.project['version']}" in (package.directory / "CHANGELOG.md").read_text()


@every_package
def test_the_version_is_one(name: str) -> None:
    """`pip show` and `__version__` tell the same, or a bug report names a version that never was."""
    package = packages()[name]
    assert importlib.import_module(package.import_name).__version__ == package.project["version"]


@every_package
def test_type_checkers_find_misspelt_names(name: str) -> None:
    """A module-level `__getattr__` that a type checker sees makes it take any name for one of the package's."""
    tree = ast.parse((packages()[name].source / "__init__.py").read_text())
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert "__getattr__" not in functions, "put __getattr__ under `if not TYPE_CHECKING:`"


@pytest.mark.parametrize("front", ["octavo_torch", "octavo_jax"])
def test_type_checkers_know_the_activations(front: str) -> None:
    """A misspelt one is found before anything runs, in either framework."""
    module = importlib.import_module(front)
    public = {name: getattr(module, name) for name in module.__all__}
    asked = {
        name: inspect.get_annotations(value.__init__ if inspect.isclass(value) else value).get("activation")
        for name, value in public.items()
        if callable(value)
    }
    known = {name: kind for name, kind in asked.items() if kind is not None}
    assert len(known) > 5
    assert set(known.values()) <= {"Activation", "Activation | None", "Name"}, known


@pytest.mark.parametrize("front", ["octavo_torch", "octavo_jax"])
def test_names_of_the_other_framework_lead_here(front: str) -> None:
    """Who comes from torch asks JAX for `grouped_linear`, and the other way round: the error names what it is here."""
    module = importlib.import_module(front)
    for name in module._SOUGHT_HERE:
        with pytest.raises(AttributeError, match=rf"no attribute '{name}'; take {front}\.") as raised:
            getattr(module, name)
        for place in re.findall(rf"{front}\.([\w.]+)", str(raised.value)):
            found: object = module
            for part in place.split("."):
                found = getattr(found, part)


def test_what_users_are_told_to_install_is_here() -> None:
    """Folders, and what of ours each package needs, as the registry tells of them."""
    needs = {
        name: {re.match(r"[a-z-]+", line)[0] for line in package.project.get("dependencies", []) if "octavo" in line}  # type: ignore[index]
        for name, package in packages().items()
    }
    assert {name: ROOT / folder for name, (folder, _) in PACKAGES.items()} == {
        name: package.directory for name, package in packages().items()
    }
    assert {name: {*needed} for name, (_, needed) in PACKAGES.items()} == needs


@every_package
def test_requirements_on_ours_have_a_floor_and_no_ceiling(name: str) -> None:
    """Plugins ask for octavo-registry>=X: incompatibility is an API level, decided at run time (architecture.md)."""
    package = packages()[name]
    for line in package.project.get("dependencies", []):
        if re.match(r"octavo\b", line):
            assert re.fullmatch(r"octavo[a-z-]*(\[[a-z,]+\])?>=[0-9.]+", line), line


def test_backends_introduce_themselves_alike() -> None:
    """`octavo doctor` prints one line of each card below the other: a sentence, with a capital and a full stop."""
    cards = "\n".join(
        path.read_text() for path in tracked("packages/*/src/**/plugin.py", "docs/examples/*/src/**/plugin.py")
    )
    summaries = re.findall(r'^    summary="(.*)",$', cards, re.MULTILINE)
    assert len(summaries) >= 10
    assert [line for line in summaries if not re.fullmatch(r"([A-Z]|jax-|torch-).*\.", line)] == []


def test_advice_to_install_kernels_knows_what_they_lack() -> None:
    """`octavo why` names a package with kernels only for operations that its card serves on that device."""
    for (distribution, device), lacking in LACKING.items():
        card = importlib.import_module(f"{distribution.replace('-', '_')}.plugin").CARD
        served = {op for row in card.capabilities if row.device == device for op in row.ops}
        assert lacking == set(OPERATIONS) - served, (distribution, device)


def test_the_repository_speaks_of_the_project_alone() -> None:
    """No path of one machine and no host of a package registry stands in what users read or run."""
    machine = re.compile(r"/(?:work|opt|root|home)/|/tmp/[a-z]|files\.pythonhosted|pypi\.org")
    texts = (".py", ".md", ".toml", ".txt", ".json", ".yml", ".html", ".css")
    for file in tracked():
        if file.suffix in texts and file.name != "test_packages.py":
            match = machine.search(file.read_text(errors="replace"))
            assert not match, f"{file.relative_to(ROOT)}: {match and match.group()}"


def test_the_repository_has_no_built_packages() -> None:
    """A mistyped command once left a folder of wheels at the top, and `git add --all` took it."""
    built = (".whl", ".so", ".o", ".pyc", ".gz", ".xz", ".zip")
    assert [str(file.relative_to(ROOT)) for file in tracked() if file.suffix in built] == []
    assert [file.name for file in ROOT.iterdir() if file.name.startswith("-")] == []
