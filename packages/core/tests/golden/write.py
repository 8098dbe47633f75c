"""Write this release's golden file: `python packages/core/tests/golden/write.py`, once, when the version is raised.

`VERSION.json` holds recipes as users write them (TOML), as the release stores them (JSON), and their fingerprints.
Each field of each kind takes each of its values that a recipe of that kind accepts. Files of a release that is out are
never written again: where this version has its file, the recipes that have come since go into `unreleased.json`, which
the next release's file replaces.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import octavo

FILE = Path(__file__).parent / f"{octavo.__version__}.json"
UNRELEASED = FILE.with_name("unreleased.json")
KINDS = (
    "HighPrecision",
    "DelayedScaling",
    "CurrentScaling",
    "RowScaling",
    "BlockScaling",
    "MXFP4Weights",
    "MXFP8",
    "NVFP4",
)
VALUES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("fprop", "dgrad", "wgrad"), ("quantized", "high_precision")),
    **dict.fromkeys(("output_dtype", "wgrad_dtype"), ("bfloat16", "float16", "float32")),
    **dict.fromkeys(("forward_format", "gradient_format"), ("e4m3", "e5m2")),
    "fast_accumulation": ([], ["fprop"], ["dgrad", "wgrad"]),
    **dict.fromkeys(
        ("power_of_two", "square_weights", "square_columns", "stochastic_gradients", "hadamard"), (True, False)
    ),
    "amax_epsilon": (0.0, 2.0**-20, 0.1),
    "history": (2, 16),
    "algorithm": ("max", "most_recent"),
    "products": ("exact", "folded"),
    "margin": (0, 3),
}
"""Values to try for each field of a recipe."""


def toml(kind: str, fields: dict[str, Any]) -> str:
    """A recipe file; JSON's notation of these values is TOML's, too."""
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in {"kind": kind, **fields}.items())


def entry(text: str) -> dict[str, str]:
    """A recipe file with what this release makes of it; RecipeError if it takes no such file."""
    recipe = octavo.Recipe.from_toml(text)
    return {"toml": text, "json": recipe.to_json(), "fingerprint": recipe.fingerprint}


def entries() -> list[dict[str, str]]:
    """Presets, and every kind with one field of its own."""
    found = [entry(toml(recipe.kind, {})) for recipe in octavo.PRESETS.values()]
    for name in KINDS:
        cls = getattr(octavo, name)
        kind = cls().kind
        for field in cls.model_fields:
            if field != "kind":
                for value in VALUES[field]:
                    try:
                        found.append(entry(toml(kind, {field: value})))
                    except octavo.RecipeError:
                        continue
    return found


def write(file: Path, content: list[dict[str, str]]) -> None:
    """One entry a line or more, for people who read differences."""
    file.write_text(json.dumps(content, indent=1) + "\n")


def main() -> int:
    """Write the file of this version, or where that exists what has come since."""
    if not FILE.exists():
        write(FILE, entries())
        UNRELEASED.unlink(missing_ok=True)
        return 0
    released = {one["toml"] for one in json.loads(FILE.read_text())}
    write(UNRELEASED, [one for one in entries() if one["toml"] not in released])
    return 0


if __name__ == "__main__":
    sys.exit(main())
