"""`octavo recipes`: the recipes that have names, and those in files."""

from __future__ import annotations

import json
import os
from typing import Annotated

import typer

import octavo_registry
from octavo import PRESETS, Recipe, RecipeError, diff
from octavo.presets import load_recipe
from octavo.quantizer import Operand
from octavo.recipe_base import GEMMS
from octavo_registry.cli.errors import BadInput
from octavo_registry.cli.output import Json, print_json, print_line, print_table
from octavo_registry.dispatch.layer_plan import computed_words

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
def show(
    which: Which,
    as_toml: Annotated[bool, typer.Option("--toml", help="Print the recipe as a TOML file.")] = False,
    as_json: Json = False,
) -> None:
    """A recipe's fields, and how it quantizes each operand. With --json or --toml: the recipe file."""
    if as_toml and as_json:
        raise BadInput("--toml and --json were both given; give one of them")
    recipe = find_recipe(which)
    if as_toml:
        print(recipe.to_toml(), end="")
        return
    if as_json:
        print_json(json.loads(recipe.to_json()))
        return
    fields = {name: _plain(recipe, name) for name in type(recipe).model_fields}
    fields["schema_version"] = recipe.SCHEMA_VERSION
    print_line(f"{type(recipe).__name__}  fingerprint {recipe.fingerprint}{computed_words(recipe)}")
    print_table("Fields", ("field", "value"), [(name, _shown(fields[name])) for name in sorted(fields)])
    rows = []
    for operand in OPERANDS:
        how = list(_operand(recipe, operand).values())
        rows.append((operand, *how, *[""] * (5 - len(how))))
    print_table("Operands", ("operand", "format", "scales", "one scale per", "planes", "rounding"), rows)


OPERANDS: tuple[Operand, ...] = ("x", "w", "dy")


def _plain(recipe: Recipe, field: str) -> object:
    """A field as JSON has it; None where the recipe has no such field."""
    value: object = getattr(recipe, field, None)
    return sorted(value) if isinstance(value, frozenset) else value


def _operand(recipe: Recipe, operand: Operand) -> dict[str, str]:
    """How an operand is quantized, in a few words each."""
    spec = recipe.quantizer(operand)
    if spec is None:
        return {"format": "high precision"}
    size = spec.block_size
    whole = "row" if spec.scaling == "row" else "group"
    block = whole if size is None else f"{size}x{size}" if spec.square else f"1x{size}"
    if spec.square_columns:
        block += f", columns {size}x{size}"
    return {
        "format": spec.format,
        "scales": spec.scale_format,
        "one scale per": block,
        "planes": spec.orientation,
        "rounding": spec.rounding if spec.mxfp4 is None else f"to MXFP4, then {spec.rounding}",
    }


def _side_by_side(operand: Operand, first: Recipe, second: Recipe) -> list[tuple[str, str, str, str]]:
    left, right = _operand(first, operand), _operand(second, operand)
    names = dict.fromkeys([*left, *right])
    return [(operand, name, left.get(name, "-"), right.get(name, "-")) for name in names]


def _shown(value: object) -> str:
    if value is None:
        return "default"
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)


def _of(recipe: Recipe, field: str) -> str:
    return _shown(_plain(recipe, field)) if field in type(recipe).model_fields else "(no such field)"


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
                "differences": [
                    {"field": d.field, "left": _plain(first, d.field), "right": _plain(second, d.field)} for d in rows
                ],
            }
        )
    elif rows:
        operands = [row for operand in OPERANDS for row in _side_by_side(operand, first, second)]
        print_table("Operands", ("operand", "what", f"left: {left}", f"right: {right}"), operands)
        fields = [(d.field, *(_of(recipe, d.field) for recipe in (first, second))) for d in rows]
        print_table("Fields", ("field", "left", "right"), fields)
    else:
        print_line(f"{left} and {right} mean the same (fingerprint {first.fingerprint})")
