"""`octavo new`: the template under another name, whole or not at all."""

from __future__ import annotations

import ast
import importlib
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from octavo_cli.errors import InputError
from octavo_cli.new import DEVICES, TEMPLATES, create, new, template_folder
from octavo_registry.discovery import install as install_hints


def test_the_name_is_everywhere_in_the_form_that_each_place_needs(tmp_path: Path) -> None:
    """Distribution, import, backend and class names; no trace of the template's."""
    folder = create("my-chip", tmp_path)
    assert folder == tmp_path / "my-chip-octavo"
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) >= 8
    for path in files:
        assert "acme" not in str(path.relative_to(tmp_path)).lower()
        text = path.read_text(encoding="utf-8")
        assert "acme" not in text.lower(), path
        if path.suffix == ".py":
            ast.parse(text)
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    assert project["project"]["name"] == "my-chip-octavo"
    assert project["project"]["entry-points"]["octavo.backends"] == {"my-chip": "my_chip_octavo.plugin"}
    card = (folder / "src" / "my_chip_octavo" / "plugin.py").read_text()
    assert 'NAME = "my-chip"' in card
    assert "MyChipBackend" in card


def test_the_copy_is_a_plugin_whose_card_imports_no_framework(tmp_path: Path) -> None:
    """Its card loads in a fresh process with torch and jax made unimportable."""
    source = create("zenith", tmp_path) / "src"
    program = (
        f"import sys; sys.path.insert(0, {str(source)!r}); sys.modules.update(torch=None, jax=None);"
        "from zenith_octavo import plugin; print(*(card.name for card in plugin.octavo_backends()))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.stdout.strip() == "zenith", result.stderr


@pytest.mark.parametrize("framework", TEMPLATES)
@pytest.mark.parametrize("device", DEVICES)
def test_a_package_for_each_framework_and_device(framework: str, device: str, tmp_path: Path) -> None:
    """Its card says so, its modules compile, and no name or device of the template is left."""
    folder = create("my-chip", tmp_path, framework, device)
    source = folder / "src"
    program = (
        f"import sys; sys.path.insert(0, {str(source)!r}); sys.modules.update(torch=None, jax=None);"
        "from my_chip_octavo import plugin; (card,) = plugin.octavo_backends();"
        "print(card.name, *sorted({(row.framework, row.device, row.min_arch) for row in card.capabilities}))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    arch = (8, 0) if device == "cuda" else None
    assert result.stdout.strip() == f"my-chip {(framework, device, arch)}", result.stderr
    texts = {
        path: path.read_text(encoding="utf-8") for path in folder.rglob("*") if path.suffix in (".py", ".md", ".toml")
    }
    assert not [path for path, text in texts.items() if "acme" in text.lower() or "acme" in str(path.name)]
    assert ("on the CPU" in "".join(texts.values())) is (device == "cpu")
    for path, text in texts.items():
        if path.suffix == ".py":
            compile(text, str(path), "exec")


@pytest.mark.parametrize("framework", TEMPLATES)
def test_an_operation_on_the_card_without_a_function(framework: str, tmp_path: Path) -> None:
    """Its author has named it on the card, and is told what is missing, and not that the card lacks it."""
    pytest.importorskip(f"octavo_{framework}")
    source = create("zenith", tmp_path, framework) / "src"
    program = (
        f"import sys; sys.path.insert(0, {str(source)!r}); from types import SimpleNamespace as Request;"
        "from zenith_octavo.plugin import octavo_load;"
        "octavo_load('zenith').bind(Request(op='dequantize', kind='row'))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "Refused: bind has no function for dequantize" in result.stderr


def test_the_package_for_jax_keeps_nan_in_its_group(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the suite asks of every backend: a NaN in one expert's weight leaves the rows of others as they were."""
    pytest.importorskip("octavo_jax")
    import jax.numpy as jnp

    import octavo
    from octavo_jax import quantize

    monkeypatch.syspath_prepend(create("zenith", tmp_path, "jax") / "src")
    gemm = importlib.import_module("zenith_octavo.gemm")
    rng, recipe = np.random.default_rng(seed), octavo.RowScaling()
    x, w = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((9, 32), (3, 16, 32)))
    sizes = jnp.array([3, 2, 3], jnp.int32)
    rows = quantize(x, recipe.quantizer("x"), sizes)
    clean, spoiled = (
        np.asarray(gemm.fprop(jnp.float32, rows, quantize(each, recipe.quantizer("w")), sizes, None, None))
        for each in (w, w.at[1].set(jnp.nan))
    )
    assert np.isnan(spoiled[3:5]).all()
    np.testing.assert_array_equal(np.delete(spoiled, [3, 4], 0), np.delete(clean, [3, 4], 0))


@pytest.mark.parametrize("framework", TEMPLATES)
@pytest.mark.parametrize("name", ["abc", "my-chip", "zenith"])
def test_imports_of_a_new_package_are_sorted(framework: str, name: str, tmp_path: Path) -> None:
    """Whatever the name: its own modules stand apart from those of others, and nothing sorts them anew."""
    folder = create(name, tmp_path, framework)
    own = f"{name.replace('-', '_')}_octavo"
    for path in (folder / "src").rglob("*.py"):
        lines = path.read_text(encoding="utf-8").splitlines()
        first = next((n for n, line in enumerate(lines) if line.startswith((f"from {own}", f"import {own}"))), None)
        if first is not None and not lines[first - 1].startswith(f"from {own}"):
            assert lines[first - 1] == "", f"{path.name}: {own}'s imports do not stand in a block of their own"
            rest = [line for line in lines[first:] if line.startswith(("from ", "import "))]
            assert all(line.startswith((f"from {own}", f"import {own}")) for line in rest), path.name


@pytest.mark.parametrize(
    ("arguments", "named"), [(("flax", "cpu"), "--framework is 'flax'"), (("torch", "tpu"), "--device is 'tpu'")]
)
def test_what_there_is_no_template_for_is_refused(arguments: tuple[str, str], named: str, tmp_path: Path) -> None:
    """Before anything is written."""
    with pytest.raises(InputError, match=named):
        create("zenith", tmp_path, *arguments)
    assert not list(tmp_path.iterdir())


def test_build_leavings_are_not_copied(tmp_path: Path) -> None:
    """Caches and built packages of a checkout stay there."""
    names = {part for path in create("zenith", tmp_path).rglob("*") for part in path.parts}
    assert not {name for name in names if name == "__pycache__" or name.endswith((".pyc", ".egg-info"))}


@pytest.mark.parametrize(
    "name", ["", "My-Chip", "my_chip", "-chip", "chip-", "a--b", "2fast", "../up", "x" * 41, "a b"]
)
def test_a_name_that_no_package_can_have_is_refused(name: str, tmp_path: Path) -> None:
    """Before anything is written."""
    with pytest.raises(InputError, match="NAME is"):
        create(name, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["torch-reference", "jax-native"])
def test_a_name_that_is_taken_is_refused(name: str, tmp_path: Path) -> None:
    """Two backends of one name serve nobody."""
    with pytest.raises(InputError, match="belongs to another backend"):
        create(name, tmp_path)


def test_an_existing_folder_is_left_alone(tmp_path: Path) -> None:
    """Work that somebody has begun is not written over."""
    (tmp_path / "zenith-octavo").mkdir()
    with pytest.raises(InputError, match="exists already"):
        create("zenith", tmp_path)
    assert not list((tmp_path / "zenith-octavo").iterdir())


def test_a_parent_that_is_a_file_is_refused(tmp_path: Path) -> None:
    """One line, nothing half-written."""
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written to"):
        create("zenith", tmp_path / "file")


def test_the_template_is_found() -> None:
    """In the tree (an editable install) or inside the package (a wheel)."""
    assert (template_folder() / "src" / "acme_octavo" / "plugin.py").is_file()


@pytest.mark.parametrize("name", ["ab", "my-very-long-chip"])
def test_it_prints_what_to_do_next(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Commands to paste: the folder as a path, comments below each other, nothing that only an index could install."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(install_hints, "installed_version", lambda _: "0.2.0")
    new(name)
    made, install, *rest = capsys.readouterr().out.splitlines()
    assert made == f"Made {name}-octavo. Next:"
    assert install == f"  pip install -e ./{name}-octavo"
    new(name, tmp_path / "my chips")
    assert shlex.split(capsys.readouterr().out.splitlines()[1])[-1] == str(tmp_path / "my chips" / f"{name}-octavo")
    assert [line.split("   #")[0].strip() for line in rest] == ["octavo doctor", f"octavo conform {name}"]
    assert len({line.index("#") for line in rest}) == 1
    assert "pip" not in "".join(rest)


def test_it_says_how_to_install_the_suite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last of its commands is another package's, which the installation for a framework does not bring."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(install_hints, "installed_version", lambda name: None if "conform" in name else "0.2.0")
    new("zenith")
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == ("octavo-conformance is not installed; in a clone of Octavo run: pip install ./packages/conformance")
