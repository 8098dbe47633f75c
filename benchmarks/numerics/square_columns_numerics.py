"""Weight gradients with square columns of x beside those of block scaling, by octavo_numerics on a CPU.

python benchmarks/numerics/square_columns_numerics.py OUTPUT COMMIT

x of the kinds of folded_numerics.py, dy normal. dw [N, K] is compared with the product of the unquantized operands and
with that of block scaling; "features" are its columns, each over its own norm, so that quiet ones count as much.
"""

from __future__ import annotations

import json
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from folded_numerics import FEATURES, KINDS, OUTPUTS, ROWS, SEEDS, drawn

from octavo import BlockScaling
from octavo_numerics import dequantize, folding_bound, quantize

Array = np.ndarray[Any, Any]
BLOCK, SQUARE = BlockScaling(), BlockScaling(square_columns=True)


def columns(values: Array, recipe: BlockScaling, operand: Any) -> Array:
    """The values that wgrad multiplies."""
    spec = recipe.quantizer(operand)
    assert spec is not None
    q = quantize(values, spec, [len(values)])
    if recipe is SQUARE and operand == "x":
        block = dequantize(quantize(values, BLOCK.quantizer("x"), [len(values)]), "columnwise")  # type: ignore[arg-type]
        assert (np.abs(dequantize(q, "columnwise") - block) <= folding_bound(q, "columnwise")).all()
    return dequantize(q, "columnwise").astype(np.float64)


def row(kind: str, seed: int) -> dict[str, Any]:
    """One x and one dy."""
    rng = np.random.default_rng(seed)
    x = drawn(kind, rng).astype(ml_dtypes.bfloat16)
    dy = rng.standard_normal((ROWS, OUTPUTS)).astype(ml_dtypes.bfloat16)
    plain = dy.astype(np.float64).T @ x.astype(np.float64)
    of_dy = columns(dy, BLOCK, "dy").T
    xs = {"block": columns(x, BLOCK, "x"), "square": columns(x, SQUARE, "x")}
    dws = {name: of_dy @ value for name, value in xs.items()}
    size = np.linalg.norm
    each = {name: size(dw - plain, axis=0) / size(plain, axis=0) for name, dw in dws.items()}
    return {
        "kind": kind,
        "seed": seed,
        "differing": float(np.mean(xs["block"] != xs["square"])),
        "x_from_block": float(size(xs["square"] - xs["block"]) / size(xs["block"])),
        "dw_from_block": float(size(dws["square"] - dws["block"]) / size(dws["block"])),
        "dw_from_input": {name: float(size(dw - plain) / size(plain)) for name, dw in dws.items()},
        "features_mean": {name: float(np.sqrt(np.mean(errors**2))) for name, errors in each.items()},
        "features_worst": {name: float(errors.max()) for name, errors in each.items()},
    }


def main() -> None:
    """Write the file."""
    output, commit = sys.argv[1:]
    content = {
        "schema_version": 1,
        "command": "python benchmarks/numerics/square_columns_numerics.py OUTPUT COMMIT",
        "commit": commit,
        "date": datetime.now(UTC).date().isoformat(),
        "machine": {"system": platform.system(), "processor": platform.machine()},
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
        "shape": {"rows": ROWS, "features": FEATURES, "outputs": OUTPUTS},
        "rows": [row(kind, seed) for kind in KINDS for seed in SEEDS],
    }
    Path(output).write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
