"""The project's own compact vectors: a clone alone verifies that the definition has not moved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo_numerics import vectors

FOLDER = Path(__file__).parent / "vectors"


@pytest.mark.parametrize("name", list(vectors.INPUTS))
def test_every_recipe_still_gives_the_recorded_bits(name: str) -> None:
    """SHA-256 of every plane, direction and dequantized value; `python -m octavo_numerics.vectors` rewrites them."""
    recorded = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    made = vectors.make(name)
    assert made["input_sha256"] == recorded["input_sha256"]
    assert made["cases"].keys() == recorded["cases"].keys()
    different = [key for key, digests in made["cases"].items() if digests != recorded["cases"][key]]
    assert not different


def test_the_script_writes_what_the_folder_holds(tmp_path: Path) -> None:
    """The files are the script's output, byte for byte, and nothing else lies beside them."""
    vectors.main(str(tmp_path))
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert written == {path.name: path.read_bytes() for path in FOLDER.iterdir()}
