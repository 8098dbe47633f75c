"""Write this release's golden files: `python packages/torch/tests/golden/write.py`, once, when the version is raised.

For each recipe the same module after two steps in the four forms that users save: `NAME.pt` (torch.save of the state
dict), `NAME.safetensors` and `NAME-codes.safetensors` (save_checkpoint), and the folder `NAME-sharded`
(save_distributed). Files of a release that is out are never written again.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import octavo
import octavo_torch

FOLDER = Path(__file__).parent / octavo_torch.__version__
G, K, N, HIDDEN = 2, 32, 16, 16
SIZES = [5, 6]
RECIPES = {
    "bf16": octavo.recipe("bf16"),
    "fp8-delayed": octavo.DelayedScaling(history=3),
    "mxfp8": octavo.MXFP8(),
    "nvfp4": octavo.NVFP4(),
}


def module_of(recipe: octavo.Recipe, seed: int) -> nn.ModuleDict:
    """A grouped layer with a bias and an MLP, which have every kind of array: weights, seeds, counters, histories."""
    options = {"recipe": recipe, "dtype": torch.bfloat16, "seed": seed, "backend": "torch-reference"}
    fc = octavo_torch.GroupedLinear(G, K, N, bias=True, **options)
    return nn.ModuleDict({"fc": fc, "mlp": octavo_torch.GroupedMLP(G, N, HIDDEN, **options)})


def run(module: nn.ModuleDict, x: Tensor) -> Tensor:
    """The module's result for rows of two groups."""
    out: Tensor = module["mlp"](module["fc"](x, SIZES), SIZES)
    return out


def main() -> int:
    """Write the folder; 1 where it exists."""
    if FOLDER.exists():
        print(f"{FOLDER} exists; raise the version of octavo-torch first", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    FOLDER.mkdir()
    for name, recipe in RECIPES.items():
        module = module_of(recipe, seed=3)
        for _ in range(2):
            run(module, torch.randn(sum(SIZES), K, dtype=torch.bfloat16)).square().mean().backward()
            octavo_torch.update_scales(module)
        module.zero_grad()
        module.eval()
        torch.save(module.state_dict(), FOLDER / f"{name}.pt")
        octavo_torch.save_checkpoint(module, FOLDER / f"{name}.safetensors")
        octavo_torch.save_distributed(module, FOLDER / f"{name}-sharded")
        if name != "bf16":
            octavo_torch.save_checkpoint(module, FOLDER / f"{name}-codes.safetensors", quantized=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
