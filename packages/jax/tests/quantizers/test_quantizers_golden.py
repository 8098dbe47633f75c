"""Quantizers that earlier releases wrote still load, with every field as it was written (tests/golden)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import octavo_jax
from octavo import QuantizerSpec
from octavo_jax.quantizers.quantizer_set import QuantizerSet

GOLDEN = Path(__file__).parents[1] / "golden"
RELEASES = sorted(folder.name for folder in GOLDEN.iterdir() if folder.name[0].isdigit())
KNOWN = [name for name in QuantizerSpec.model_fields if name not in QuantizerSpec.ADDED_FIELDS]
"""The fields of every release."""
FILES = sorted(GOLDEN.glob("*/*.json"))


def _of_today(name: str = "*") -> list[Path]:
    """Files of this release, and of what has come since; a release that is just made has nothing since."""
    folders = (octavo_jax.__version__, "unreleased")
    return sorted(path for folder in folders for path in (GOLDEN / folder).glob(f"{name}.json"))


def _load(file: Path) -> QuantizerSet:
    arrays = file.with_suffix(".npz")
    if not arrays.exists():
        return QuantizerSet.from_json(file.read_text())
    with np.load(arrays, allow_pickle=False) as stored:
        return QuantizerSet.from_json(file.read_text(), dict(stored))


def _lost(written: dict[str, Any], loaded: QuantizerSet) -> list[str]:
    """The fields of a file's content that the loaded set has otherwise, by name."""
    found = []
    for operand in ("x", "kernel", "grad"):
        quantizer = getattr(loaded, operand)
        if (written[operand] is None) != (quantizer is None):
            found.append(operand)
        elif quantizer is not None:
            fields = written[operand]["spec"]
            found += [f"{operand}.{name}" for name, value in fields.items() if getattr(quantizer.spec, name) != value]
            shape = written[operand]["state"]
            held = None if quantizer.state is None else quantizer.state.history.shape
            if held != (None if shape is None else (shape["history"], shape["groups"])):
                found.append(f"{operand}.state")
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_an_earlier_release_still_loads(file: Path) -> None:
    """Each field, None and state is what was written, and is written again the same."""
    written = json.loads(file.read_text())
    loaded = _load(file)
    assert _lost(written, loaded) == []
    again = json.loads(loaded.to_json())
    for operand in ("x", "kernel", "grad"):
        assert (again[operand] is None) == (written[operand] is None)
        if written[operand] is not None:
            assert again[operand]["spec"].items() >= written[operand]["spec"].items()
    arrays = file.with_suffix(".npz")
    assert bool(loaded.arrays()) == arrays.exists()
    if arrays.exists():
        with np.load(arrays, allow_pickle=False) as stored:
            assert set(stored) == set(loaded.arrays())
            assert all(np.array_equal(stored[name], array) for name, array in loaded.arrays().items())


@pytest.mark.parametrize("release", RELEASES)
def test_a_release_wrote_each_field_in_two_values(release: str) -> None:
    """Otherwise a field that a later release forgets could come back as its default, and nobody would see."""
    specs = [
        part["spec"]
        for file in (GOLDEN / release).glob("*.json")
        for part in json.loads(file.read_text()).values()
        if isinstance(part, dict)
    ]
    names = {name for spec in specs for name in spec}
    same = [name for name in names if len({json.dumps(spec.get(name)) for spec in specs}) < 2]
    assert same == []


def test_this_release_has_its_files() -> None:
    """A new version, or a new field, comes with files: `python packages/jax/tests/golden/write.py` writes them."""
    folder = GOLDEN / octavo_jax.__version__
    assert folder.is_dir(), "run packages/jax/tests/golden/write.py"
    one = json.loads(next(folder.glob("mxfp8.json")).read_text())
    assert set(one["x"]["spec"]) == set(KNOWN), "a released file lacks a new field: add it to ADDED_FIELDS"
    written = [json.loads(file.read_text()) for file in _of_today()]
    said = {
        name
        for one in written
        for operand in ("x", "kernel", "grad")
        for name in (one[operand] or {"spec": {}})["spec"]
    }
    assert said >= QuantizerSpec.ADDED_FIELDS, "run packages/jax/tests/golden/write.py"


def test_a_lost_field_is_seen() -> None:
    """Planted: for every field, a reader that drops it is told by name."""
    seen = set()
    for file in (GOLDEN / octavo_jax.__version__).glob("*.json"):
        written, loaded = json.loads(file.read_text()), _load(file)
        quantizer = loaded.x
        if quantizer is None:
            continue
        for name in KNOWN:
            dropped = {**dict(quantizer.spec), name: "not what was written"}
            spec = QuantizerSpec.model_construct(**dropped)
            assert _lost(written, replace(loaded, x=replace(quantizer, spec=spec))) == [f"x.{name}"]
            seen.add(name)
        if quantizer.state is not None:
            assert _lost(written, replace(loaded, x=replace(quantizer, state=None))) == ["x.state"]
            seen.add("state")
        assert _lost(written, replace(loaded, x=None)) == ["x"]
    assert seen == {*KNOWN, "state"}
    (file,) = _of_today("mxfp4")
    written, loaded = json.loads(file.read_text()), _load(file)
    assert loaded.kernel is not None
    dropped = QuantizerSpec(**{**dict(loaded.kernel.spec), "mxfp4": None})
    assert _lost(written, replace(loaded, kernel=replace(loaded.kernel, spec=dropped))) == ["kernel.mxfp4"]


OPTIONAL = [name for name in KNOWN if not QuantizerSpec.model_fields[name].is_required()]


@pytest.mark.parametrize("name", OPTIONAL)
def test_a_file_from_before_a_field_loads_with_its_default(name: str) -> None:
    """An upgrade: what a release wrote that did not know the field has its default, beside all that it did write, and
    the arrays of its state; written again it has the field."""
    for file in ("mxfp8-square", "epsilon", "delayed-after-two-steps"):
        path = GOLDEN / "0.1.0" / f"{file}.json"
        today, old = json.loads(path.read_text()), json.loads(path.read_text())
        for operand in ("x", "kernel", "grad"):
            del old[operand]["spec"][name]
            today[operand]["spec"][name] = QuantizerSpec.model_fields[name].default
        stored = {} if not path.with_suffix(".npz").exists() else dict(np.load(path.with_suffix(".npz")))
        loaded = QuantizerSet.from_json(json.dumps(old), stored or None)
        assert _lost(today, loaded) == []
        assert json.loads(loaded.to_json()) == today
        assert all(np.array_equal(stored[key], array) for key, array in loaded.arrays().items())


def test_a_file_without_what_has_no_default_is_refused() -> None:
    """A format or a scaling is never guessed, and a field of a newer release is never dropped."""
    content = json.loads((GOLDEN / "0.1.0" / "mxfp8.json").read_text())
    for name in set(KNOWN) - set(OPTIONAL):
        spec = {key: value for key, value in content["x"]["spec"].items() if key != name}
        with pytest.raises(ValueError, match=f"not a quantizer_set: .*{name}"):
            QuantizerSet.from_json(json.dumps({**content, "x": {**content["x"], "spec": spec}}))
    spec = {**content["x"]["spec"], "from_a_newer_release": 1}
    with pytest.raises(ValueError, match="from_a_newer_release"):
        QuantizerSet.from_json(json.dumps({**content, "x": {**content["x"], "spec": spec}}))


def test_without_arrays_a_state_is_abstract() -> None:
    """What orbax restores into: the tree with shapes where arrays belong."""
    file = GOLDEN / "0.1.0" / "delayed-after-two-steps.json"
    abstract = QuantizerSet.from_json(file.read_text())
    assert jax.tree.structure(abstract) == jax.tree.structure(_load(file))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(abstract))
