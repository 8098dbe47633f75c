"""What travels between devices in place of high-precision rows: codes and scales of a recipe that scales row by row."""

from __future__ import annotations

from octavo.quantizer import Operand, QuantizerSpec
from octavo.recipe_base import Recipe


def payload_spec(recipe: Recipe, operand: Operand) -> QuantizerSpec:
    """How the rows of `operand` ("x" or "dy") are quantized for the exchange; ValueError for a recipe that cannot.

    A row must be decoded by itself on another device, so no scale may span rows, and no seed is at hand.
    """
    spec = recipe.quantizer(operand, checkpoint_name=None)
    if spec is None or not spec.independent_rows:
        raise ValueError(
            f"payload is {recipe.kind!r}, whose {operand} has no scales of single rows; give RowScaling, BlockScaling "
            "or MXFP8 with every GEMM quantized, or None to send the rows as they are"
        )
    return spec.with_orientation("rowwise")
