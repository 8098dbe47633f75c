"""What may serve the experts of a model of transformers, by a short name."""

from __future__ import annotations

from octavo_torch.adapters.transformers import register

THEIRS = "grouped_mm"
"""transformers' own grouped products, which every other way is compared with."""
RECIPES = ("bf16", "fp8-current", "fp8-row", "fp8-block", "mxfp8", "mxfp8-folded", "mxfp4", "nvfp4")
"""The adapter keeps nothing between calls, so delayed scaling has no place in it."""


def implementation(way: str) -> str:
    """The experts implementation of `grouped_mm`, or of RECIPE[/FORM[/WEIGHT_CODES]] through the adapter."""
    if way == THEIRS:
        return THEIRS
    recipe, *kept = way.split("/")
    options = dict(zip(("form", "weight_codes"), kept, strict=False))
    return register(recipe, name=f"octavo-{way}", **options)  # type: ignore[arg-type]
