"""A grouped linear layer's forward and backward again and again: every result has the bits of the first one."""

from __future__ import annotations

import hashlib
import secrets
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

import octavo
import octavo_torch

RECIPES = ("bf16", "fp8-current", "fp8-row", "fp8-block", "mxfp8", "nvfp4")
BACKENDS = ("torch-reference", "torch-native")
SIZES = (64, 0, 17, 100, 0, 75)
M, N, K = 280, 160, 128
THREADS = 8


def _digest(tensors: tuple[torch.Tensor, ...]) -> str:
    content = hashlib.sha256()
    for value in tensors:
        content.update(value.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return content.hexdigest()


def _step(recipe: octavo.Recipe, backend: str, seed: int) -> str:
    """Of y, dx and dw, from inputs that `seed` makes."""
    generator = torch.Generator().manual_seed(seed)
    x, w, dy = (torch.randn(shape, generator=generator).bfloat16() for shape in ((M, K), (len(SIZES), N, K), (M, N)))
    x, w = x.requires_grad_(), w.requires_grad_()
    y = octavo_torch.grouped_linear(x, w, list(SIZES), recipe=recipe, seed=seed, backend=backend)
    dx, dw = torch.autograd.grad(y, (x, w), dy)
    return _digest((y, dx, dw))


def measure(count: int | None) -> dict[str, Any]:
    """Different results of `count` repeats (None: 1 000), half of them by threads at once."""
    repeats, seed = count or 1000, secrets.randbits(31)
    rows = []
    for backend in BACKENDS:
        for name in RECIPES:
            recipe = octavo.recipe(name)
            torch.set_num_threads(1)
            alone = [_step(recipe, backend, seed) for _ in range(repeats // 2)]
            torch.set_num_threads(2)
            with ThreadPoolExecutor(THREADS) as pool:
                beside = list(pool.map(lambda _, r=recipe, b=backend: _step(r, b, seed), range(repeats - repeats // 2)))
            kinds = len({*alone, *beside})
            rows.append({"backend": backend, "recipe": name, "repeats": len(alone + beside), "different": kinds - 1})
    return {
        "seed": seed,
        "shape": {"M": M, "N": N, "K": K, "sizes": list(SIZES)},
        "threads_at_once": THREADS,
        "repeats": repeats,
        "layers": len(rows),
        "rows": rows,
        "faults": sum(row["different"] for row in rows),
    }
