"""Recipes by name and from files."""

from __future__ import annotations

from pathlib import Path

import pytest

import octavo


@pytest.mark.parametrize("name", [*octavo.PRESETS, "high_precision", "delayed", "current", "row", "block"])
def test_a_name_gives_a_recipe(name: str) -> None:
    """Command lines and config files say recipes by name: presets, and kinds with their defaults."""
    assert octavo.recipe(name) == octavo.recipe(name)
    assert octavo.Recipe.from_json(octavo.recipe(name).to_json()) == octavo.recipe(name)


CHANGED = {
    "bf16": ("high_precision", {}),
    "fp8-delayed": ("delayed", {}),
    "fp8-current": ("current", {}),
    "fp8-row": ("row", {}),
    "fp8-row-wgrad-high-precision": ("row", {"wgrad": "high_precision"}),
    "fp8-block": ("block", {}),
    "fp8-block-fp32-scales": ("block", {"power_of_two": False}),
    "fp8-block-square-columns": ("block", {"square_columns": True}),
    "fp8-block-wgrad-high-precision": ("block", {"wgrad": "high_precision"}),
    "mxfp4": ("mxfp4_weights", {}),
    "mxfp8": ("mxfp8", {}),
    "mxfp8-forward-only": ("mxfp8", {"dgrad": "high_precision", "wgrad": "high_precision"}),
    "mxfp8-folded": ("mxfp8", {"products": "folded"}),
    "mxfp8-square": ("mxfp8", {"square_weights": True}),
    "nvfp4": ("nvfp4", {}),
    "nvfp4-wgrad-high-precision": ("nvfp4", {"wgrad": "high_precision"}),
}


def test_a_name_stands_for_one_recipe() -> None:
    """By kind, and by what differs from its defaults: a config that says the name computes the same tomorrow."""
    fields = {name: type(recipe).model_fields for name, recipe in octavo.PRESETS.items()}
    found = {
        name: (recipe.kind, {key: value for key, value in recipe if value != fields[name][key].default})
        for name, recipe in octavo.PRESETS.items()
    }
    assert found == CHANGED


def test_an_unknown_name_lists_the_known_ones() -> None:
    """A typing error is mended from the message alone."""
    with pytest.raises(octavo.RecipeError, match=r"got 'mxpf8'; did you mean mxfp8\?; known names are .*mxfp8"):
        octavo.recipe("mxpf8")
    with pytest.raises(octavo.RecipeError, match=r"; did you mean fp8-delayed, fp8-current, fp8-row or fp8-block\?"):
        octavo.recipe("fp8")  # closer to mxfp8 in its letters
    with pytest.raises(octavo.RecipeError, match=r"got 'MXFP8'; did you mean mxfp8\?"):
        octavo.recipe("MXFP8")
    for kind, recipe in octavo.Recipe.kinds().items():  # the class's name, as Python has it
        with pytest.raises(octavo.RecipeError, match=rf"got '{recipe.__name__}'; did you mean {kind}\?"):
            octavo.recipe(recipe.__name__)
    with pytest.raises(octavo.RecipeError) as caught:
        octavo.recipe("x" * 100_000)
    assert len(str(caught.value)) < 1_000
    with pytest.raises(octavo.RecipeError, match="got None, a NoneType; give the name of a preset"):
        octavo.recipe(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("suffix", [".json", ".toml"])
def test_a_file_gives_the_recipe_that_was_written(tmp_path: Path, suffix: str) -> None:
    """A recipe can be kept beside a training script."""
    file = tmp_path / f"recipe{suffix}"
    recipe = octavo.MXFP8(wgrad="high_precision")
    file.write_text(recipe.to_json() if suffix == ".json" else 'kind = "mxfp8"\nwgrad = "high_precision"\n')
    assert octavo.load_recipe(file) == recipe


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("recipe.yaml", b"", "ends in .json or .toml"),
        ("absent.json", None, "cannot be read"),
        ("cut.json", b'{"kind": "mx', "not valid JSON"),
        ("binary.json", b"\xff\xfe\x00", "not UTF-8"),
        ("wrong.toml", b"kind = ", "not valid TOML"),
        ("huge.json", b" " * (1 << 20) + b"{}", "larger than"),
        ("field.toml", b'kind = "row"\nfprop = "no"', "RowScaling.fprop: got 'no'"),
    ],
)
def test_a_bad_file_is_named_with_its_fault(tmp_path: Path, name: str, content: bytes | None, reason: str) -> None:
    """Bad input: a one-line error with the file, the cause and the fix."""
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(octavo.RecipeError, match=reason) as caught:
        octavo.load_recipe(file)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_pickle_is_never_loaded(tmp_path: Path) -> None:
    """A hostile checkpoint cannot run code through a recipe file (faults: malicious checkpoint)."""
    import pickle

    canary = tmp_path / "canary"

    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[Path, str]]:
            return Path.write_text, (canary, "boom")

    file = tmp_path / "recipe.json"
    file.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(octavo.RecipeError):
        octavo.load_recipe(file)
    assert not canary.exists()


def test_a_difference_reads_as_a_sentence() -> None:
    """`octavo recipes diff` prints these rows."""
    rows = octavo.diff(octavo.MXFP8(), octavo.MXFP8(dgrad="high_precision", square_weights=True))
    assert [str(row) for row in rows] == ["dgrad: quantized -> high_precision", "square_weights: False -> True"]
    kinds = {row.field: str(row) for row in octavo.diff(octavo.MXFP8(), octavo.NVFP4())}
    assert kinds["kind"] == "kind: mxfp8 -> nvfp4"
    assert kinds["hadamard"] == "hadamard: (no such field) -> True"
    with pytest.raises(octavo.RecipeError, match="right is 'nvfp4'; give a recipe"):
        octavo.diff(octavo.MXFP8(), "nvfp4")  # type: ignore[arg-type]
