"""The tiles of each kind of product: fixed, because results would otherwise depend on what a tuner once measured."""

from __future__ import annotations

from typing import Any, NamedTuple

from octavo_triton.products.spec import Chip, GemmSpec, Product


class Tile(NamedTuple):
    """Columns of the result, depth of a step of the sum, warps, stages of the pipeline.

    What stages hold must fit into the chip's shared memory, 99 KiB on sm_89 and sm_120;
    packages/torch-triton/tests/compiled checks it.
    """

    columns: int
    depth: int
    warps: int
    stages: int


TILES: dict[Product, Tile] = {
    "bfloat16": Tile(128, 64, 8, 3),
    "float16": Tile(128, 64, 8, 3),
    "float32": Tile(64, 32, 8, 2),
    "half": Tile(128, 64, 8, 2),
    "fp8": Tile(128, 128, 8, 2),
    "scaled": Tile(128, 128, 8, 2),
}
TILE_OF_COPIES = Tile(128, 32, 8, 2)
"""Of dequantized copies, which are made in registers: a block of MXFP8 deep."""
TILE_OF_INTERPRETER = Tile(128, 128, 4, 1)
"""Each step costs it the same, whatever its size."""
BESIDE = 8
"""Panels whose tiles are made at a time."""

_HOPPER: dict[Product, Tile] = {
    "bfloat16": Tile(256, 64, 8, 4),
    "float16": Tile(256, 64, 8, 4),
    "fp8": Tile(128, 128, 8, 4),
}
_HOPPER_COLUMNS: dict[Product, Tile] = {"bfloat16": Tile(128, 64, 4, 3), "float16": Tile(128, 64, 4, 3)}
"""Of wgrad's values: two programs fit on a multiprocessor, and one multiplies while the other stores."""
_DESCRIBED: dict[Chip, dict[Product, Tile]] = {
    "sm_89": {"fp8": Tile(64, 128, 8, 2)},  # 128 columns spill 712 bytes of a thread
    "sm_90": _HOPPER,
    "sm_100": _HOPPER,
    "sm_120": {"fp8": Tile(128, 128, 8, 2)},
}


def tile_of(spec: GemmSpec) -> Tile:
    """The tile of a GEMM by pointers."""
    if spec.chip == "interpreter":
        return TILE_OF_INTERPRETER
    copies = spec.scaling in ("mxfp8", "nvfp4") and spec.product != "scaled"
    return TILE_OF_COPIES if copies else TILES[spec.product]


def described_tile(spec: GemmSpec) -> Tile | None:
    """The tile of a GEMM by descriptors; None where it is made by pointers."""
    if spec.scaling in ("mxfp8", "nvfp4"):
        return None
    if spec.gemm == "wgrad" and spec.scaling == "none" and spec.chip in ("sm_90", "sm_100"):
        return _HOPPER_COLUMNS.get(spec.product)
    return _DESCRIBED.get(spec.chip, {}).get(spec.product)


def launch_constants(spec: GemmSpec, tile: Tile) -> dict[str, Any]:
    """The constants that every kernel of a GEMM is compiled with, and Triton's own options."""
    return {
        "SCALING": spec.scaling,
        "A_FORMAT": spec.left_format,
        "B_FORMAT": spec.right_format,
        "PRODUCT": spec.product,
        "COLUMNS": tile.columns,
        "DEPTH": tile.depth,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        "enable_fp_fusion": True,
    }
