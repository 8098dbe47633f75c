"""A grouped linear layer's forward and backward again and again: every result has the bits of the first one.

On a GPU the threads take a stream each, so that kernels of several layers run beside each other, and a copy engine and
a dense product keep the memory and the multiprocessors busy meanwhile.
"""

from __future__ import annotations

import secrets
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

import octavo
import octavo_torch

RECIPES = ("bf16", "fp8-current", "fp8-row", "fp8-block", "mxfp8", "nvfp4")
BACKENDS = {"cpu": ("torch-reference", "torch-native"), "cuda": ("torch-native",)}
SIZES = {"cpu": (64, 0, 17, 100, 0, 75), "cuda": (640, 0, 17, 1000, 1, 743)}
SHAPE = {"cpu": (280, 160, 128), "cuda": (2500, 1152, 1024)}
"""M, N and K: rows past the sum of the sizes, and GEMMs of several tiles on a GPU."""
THREADS = 8


Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Step:
    """A layer's forward and backward on inputs that `seed` makes, which the device holds."""

    def __init__(self, recipe: octavo.Recipe, backend: str, device: str, seed: int) -> None:
        m, n, k = SHAPE[device]
        generator = torch.Generator().manual_seed(seed)
        drawn = (torch.randn(shape, generator=generator) for shape in ((m, k), (len(SIZES[device]), n, k), (m, n)))
        x, w, self.dy = (value.bfloat16().to(device) for value in drawn)
        self.leaves = (x.requires_grad_(), w.requires_grad_())
        self.sizes = torch.tensor(SIZES[device], device=device) if device == "cuda" else list(SIZES[device])
        self.how: dict[str, Any] = {"recipe": recipe, "backend": backend, "seed": seed}

    def __call__(self) -> Results:
        """y, dx and dw; rows of y and dx past the sum of the sizes are zeros, and count."""
        y = octavo_torch.grouped_linear(*self.leaves, self.sizes, **self.how)
        dx, dw = torch.autograd.grad(y, self.leaves, self.dy)
        return y.detach(), dx, dw

    def differs(self, expected: Results) -> bool:
        """Whether a run of it has other bits than those of an earlier one."""
        pairs = zip(self(), expected, strict=True)
        return not all(torch.equal(ours.view(torch.int16), theirs.view(torch.int16)) for ours, theirs in pairs)


def _beside(step: Step, expected: Results, device: str, repeats: int) -> list[bool]:
    """Whether each result of THREADS at once differs."""
    if device == "cpu":
        with ThreadPoolExecutor(THREADS) as pool:
            return list(pool.map(lambda _: step.differs(expected), range(repeats)))
    torch.cuda.synchronize()

    def worker(runs: int) -> list[bool]:
        with torch.cuda.stream(torch.cuda.Stream()):
            load = torch.randn(2048, 2048, device=device, dtype=torch.bfloat16)
            found = []
            for _ in range(runs):
                load.copy_((load @ load).sign())
                found.append(step.differs(expected))
        return found

    shares = [len(range(first, repeats, THREADS)) for first in range(THREADS)]
    with ThreadPoolExecutor(THREADS) as pool:
        return [result for results in pool.map(worker, shares) for result in results]


def measure(count: int | None, device: str = "cpu") -> dict[str, Any]:
    """Different results of `count` repeats (None: 1 000), half of them by threads at once."""
    repeats, seed = count or 1000, secrets.randbits(31)
    rows = []
    for backend in BACKENDS[device]:
        for name in RECIPES:
            step = Step(octavo.recipe(name), backend, device, seed)
            torch.set_num_threads(1)
            expected = step()
            found = [step.differs(expected) for _ in range(repeats // 2)]
            torch.set_num_threads(2)
            found += _beside(step, expected, device, repeats - repeats // 2)
            rows.append({"backend": backend, "recipe": name, "repeats": len(found), "different": sum(found)})
    m, n, k = SHAPE[device]
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "seed": seed,
        "shape": {"M": m, "N": n, "K": k, "sizes": list(SIZES[device])},
        "threads_at_once": THREADS,
        "repeats": repeats,
        "layers": len(rows),
        "rows": rows,
        "faults": sum(row["different"] for row in rows),
    }
