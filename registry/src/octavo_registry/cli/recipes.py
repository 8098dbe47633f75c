"""`octavo recipes`: the recipes that have names, and those in files."""

from __future__ import annotations

import json
import os
from typing import Annotated

import typer

import octavo_registry
from octavo import PRESETS, Recipe, RecipeError, diff
from octavo.presets import load_recipe
from octavo.recipe_base import GEMMS
from octavo_registry.cli.output import Json, print_json, print_line, print_table

app = typer.Typer(help="List, show and compare recipes.", add_completion=False)


def complete_recipe(incomplete: str) -> list[str]:
    """Names for shell completion; those of plugins are left out, so that a key press loads none."""
    return [name for name in PRESETS if name.startswith(incomplete)]


Which = Annotated[
    str, typer.Argument(help="A recipe's name, or a .json or .toml file.", autocompletion=complete_recipe)
]


def find_recipe(name: str) -> Recipe:
    """The recipe called `name`, or the one in the file `name`; RecipeError says what there is."""
    if name.endswith((".json", ".toml")) or os.sep in name:
        try:
            return load_recipe(name)
        except RecipeError:
            if not os.path.isfile(name):
                raise
            octavo_registry.recipes()  # the file may hold a recipe of a plugin, which is known from here on
            return load_recipe(name)
    return octavo_registry.recipe(name)


def _slots(recipe: Recipe) -> str:
    quantized = [gemm for gemm in GEMMS if recipe.quantizes(gemm)]
    return ", ".join(quantized) or "none"


@app.command("list")
def list_recipes(as_json: Json = False) -> None:
    """Every recipe that has a name, with those that plugins add."""
    named = dict(PRESETS) | {recipe.kind: recipe for recipe in octavo_registry.recipes()}
    if as_json:
        print_json(
            [
                {"name": name, "kind": r.kind, "fingerprint": r.fingerprint, "recipe": json.loads(r.to_json())}
                for name, r in named.items()
            ]
        )
        return
    rows = [(name, recipe.kind, recipe.fingerprint, _slots(recipe)) for name, recipe in named.items()]
    print_table("Recipes", ("name", "kind", "fingerprint", "quantized GEMMs"), rows)


@app.command()
def show(which: Which, as_json: Json = False) -> None:
    """A recipe's fields, and how it quantizes each operand. With --json: the recipe file."""
    recipe = find_recipe(which)
    if as_json:
        print_json(json.loads(recipe.to_json()))
        return
    fields = json.loads(recipe.to_json())
    print_line(f"{type(recipe).__name__}  fingerprint {recipe.fingerprint}")
    print_table("Fields", ("field", "value"), [(name, _shown(value)) for name, value in fields.items()])
    rows = []
    for operand in ("x", "w", "dy"):
        spec = recipe.quantizer(operand)
        if spec is None:
            rows.append((operand, "high precision", "", "", "", ""))
            continue
        size = spec.block_size
        whole = "row" if spec.scaling == "row" else "group"
        block = whole if size is None else f"{size}x{size}" if spec.square else f"1x{size}"
        rows.append((operand, spec.format, spec.scale_format, block, spec.orientation, spec.rounding))
    print_table("Operands", ("operand", "format", "scales", "one scale a", "planes", "rounding"), rows)


def _shown(value: object) -> str:
    if value is None:
        return "default"
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)


@app.command("diff")
def compare(left: Which, right: Which, as_json: Json = False) -> None:
    """The fields in which two recipes differ."""
    first, second = find_recipe(left), find_recipe(right)
    rows = diff(first, second)
    if as_json:
        print_json(
            {
                "left": first.fingerprint,
                "right": second.fingerprint,
                "differences": [{"field": d.field, "left": d.left, "right": d.right} for d in rows],
            }
        )
    elif rows:
        missing = "(no such field)"
        print_table(
            "Differences", ("field", left, right), [(d.field, d.left or missing, d.right or missing) for d in rows]
        )
    else:
        print_line(f"{left} and {right} mean the same (fingerprint {first.fingerprint})")
