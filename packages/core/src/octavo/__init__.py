"""Recipes for low-precision grouped linear layers, and the specs of quantizers and grouped tensors.

A recipe, such as `octavo.BlockScaling()` or `octavo.recipe("mxfp8")`, says how each of a layer's three products is
computed. The layers that take it are in `octavo_torch` and `octavo_jax`.

Values only: this package reads no environment and imports neither numpy, torch, jax nor pluggy.
"""

from octavo.difference import Difference, diff
from octavo.errors import NoBackendError, OctavoError, RecipeError
from octavo.grouped_tensor import GroupedTensorSpec, block_bound, check_group_sizes
from octavo.presets import PRESETS, load_recipe, recipe
from octavo.quantizer import QuantizerSpec
from octavo.recipe_base import Recipe
from octavo.recipes import (
    MXFP8,
    NVFP4,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    HighPrecision,
    MXFP4Weights,
    RowScaling,
)

__version__ = "0.2.0"

__all__ = [
    "MXFP8",
    "NVFP4",
    "PRESETS",
    "BlockScaling",
    "CurrentScaling",
    "DelayedScaling",
    "Difference",
    "GroupedTensorSpec",
    "HighPrecision",
    "MXFP4Weights",
    "NoBackendError",
    "OctavoError",
    "QuantizerSpec",
    "Recipe",
    "RecipeError",
    "RowScaling",
    "block_bound",
    "check_group_sizes",
    "diff",
    "load_recipe",
    "recipe",
]
