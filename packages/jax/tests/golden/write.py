"""Write this release's golden files: `python packages/jax/tests/golden/write.py`, once, when the version is raised.

One quantizer set per file, `NAME.json` as `QuantizerSet.to_json` gives it and `NAME.npz` with the arrays of its states.
Every field of a quantizer takes two values or more among the files of a release, so that one that is lost shows.
The folder `orbax` is a checkpoint of Flax modules (flax_trees.py).
Files of a release that is out are never written again: where this version has its folder, the sets of recipes that have
come since go into `unreleased`, which the next release's folder replaces.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax_trees import write_orbax

import octavo
import octavo_jax
from octavo_jax.quantizers.quantizer_set import QuantizerSet, quantizer_set, with_state

FOLDER = Path(__file__).parent / octavo_jax.__version__
UNRELEASED = FOLDER.with_name("unreleased")


def cases() -> dict[str, QuantizerSet]:
    """Quantizer sets by name."""
    recipes = {**octavo.PRESETS, "fp8-delayed": octavo.DelayedScaling(history=4)}
    made = {name: quantizer_set(recipe, groups=3) for name, recipe in recipes.items()}
    made["other-name"] = quantizer_set(octavo.MXFP8(), checkpoint_name="experts")
    made["no-name"] = quantizer_set(octavo.NVFP4(), checkpoint_name=None)
    made["epsilon"] = quantizer_set(octavo.CurrentScaling(power_of_two=True, amax_epsilon=2.0**-20))
    made["columnwise"] = quantizer_set(octavo.RowScaling(fprop="high_precision"))
    recipe = octavo.DelayedScaling(history=3, forward_format="e5m2")
    state = octavo_jax.init_delayed(recipe, 2)
    for step in range(1, 3):
        amaxes = jnp.array([1.5, 2.0**step], jnp.float32)
        parts = (octavo_jax.record_amax(part, amaxes * n) for n, part in enumerate(vars(state).values(), 1))
        state = octavo_jax.update_delayed(octavo_jax.DelayedState(*parts), recipe)
    made["delayed-after-two-steps"] = with_state(quantizer_set(recipe, groups=2), state)
    return made


def write(folder: Path, name: str, quantizers: QuantizerSet) -> None:
    """One set's files."""
    (folder / f"{name}.json").write_text(quantizers.to_json() + "\n")
    if quantizers.arrays():
        np.savez(folder / f"{name}.npz", **{key: np.asarray(array) for key, array in quantizers.arrays().items()})


def main() -> int:
    """Write the folder of this version, or where that exists what has come since."""
    released = {file.stem for file in FOLDER.glob("*.json")}
    folder = UNRELEASED if released else FOLDER
    folder.mkdir(exist_ok=True)
    for name, quantizers in cases().items():
        if name not in released:
            write(folder, name, quantizers)
    if not released:
        write_orbax(FOLDER / "orbax")
        shutil.rmtree(UNRELEASED, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
