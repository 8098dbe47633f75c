"""A MoE layer's forward and backward in a CUDA graph, replayed with other routings: the bits of an eager call.

Every replay gets its own tokens, weights of choices and gradient, and a routing of one of KINDS; no shape changes.
"""

from __future__ import annotations

import secrets
from typing import Any

import torch
from torch import Tensor

import octavo
import octavo_torch

RECIPES = ("bf16", "fp8-block", "fp8-current")
FORMS = ("standard", "lean")
TOKENS, CHOICES, EXPERTS, SIDES = 1000, 4, 16, (1024, 512)
"""T, k, G, and K with the experts' hidden features."""
KINDS = ("even", "skewed", "two experts", "one expert", "some nowhere", "no tokens")


def _routed(kind: str) -> Tensor:
    """Choices [T, k]; -1: nowhere."""
    scores = torch.rand(TOKENS, EXPERTS, device="cuda")
    if kind == "skewed":
        scores += 3 * torch.rand(EXPERTS, device="cuda").pow(4)
    choices = scores.topk(CHOICES, -1).indices
    if kind == "two experts":
        return torch.where(choices < EXPERTS // 2, 3, EXPERTS - 1)
    if kind == "one expert":
        return torch.full_like(choices, int(torch.randint(EXPERTS, ())))
    if kind == "some nowhere":
        return torch.where(torch.rand(TOKENS, CHOICES, device="cuda") < 0.3, -1, choices)
    return torch.full_like(choices, -1) if kind == "no tokens" else choices


class Replayed:
    """A captured step with its static inputs, and the same step called eagerly."""

    def __init__(self, recipe: octavo.Recipe, form: str) -> None:
        (k, f), drawn = SIDES, torch.randn
        self._how: dict[str, Any] = {"recipe": recipe, "form": form, "backend": "torch-native"}
        self._w1 = (drawn(EXPERTS, 2 * f, k, device="cuda") * k**-0.5).bfloat16().requires_grad_()
        self._w2 = (drawn(EXPERTS, k, f, device="cuda") * f**-0.5).bfloat16().requires_grad_()
        self._static = self._drawn("even")
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                self._step(*self._static)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._results = self._step(*self._static)

    @staticmethod
    def _drawn(kind: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x, choices, weights and dy, with a few values far out."""
        x, dy = (torch.randn(TOKENS, SIDES[0], device="cuda") for _ in range(2))
        x = torch.where(torch.rand_like(x) < 1e-3, 100 * x, x)
        weights = torch.rand(TOKENS, CHOICES, device="cuda")
        return x.bfloat16().requires_grad_(), _routed(kind), weights.requires_grad_(), dy.bfloat16()

    def _step(self, x: Tensor, choices: Tensor, weights: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
        """y and every gradient."""
        y = octavo_torch.moe_mlp(x, choices, weights, self._w1, self._w2, **self._how)
        return y.detach(), *torch.autograd.grad(y, (x, weights, self._w1, self._w2), dy)

    def differs(self, kind: str) -> Tensor:
        """Whether a replay has other bits than an eager call with the same inputs; on the device."""
        given = self._drawn(kind)
        with torch.no_grad():
            for held, value in zip(self._static, given, strict=True):
                held.copy_(value)
            for result in self._results:
                result.fill_(float("nan"))  # a replay that writes nothing is seen
        self._graph.replay()
        expected = self._step(*given)
        pairs = zip(self._results, expected, strict=True)
        return torch.stack([(ours.view(torch.uint8) != own.view(torch.uint8)).any() for ours, own in pairs]).any()


def measure(count: int | None, device: str = "cuda") -> dict[str, Any]:
    """Replays with other bits, of `count` (None: 1 000) for each recipe and form."""
    replays, seed = count or 1000, secrets.randbits(31)
    torch.manual_seed(seed)
    rows = []
    for name in RECIPES:
        for form in FORMS:
            step = Replayed(octavo.recipe(name), form)
            kinds = [KINDS[number % len(KINDS)] for number in range(replays)]
            found = torch.stack([step.differs(kind) for kind in kinds]).tolist()
            by_kind = {kind: sum(bad for bad, own in zip(found, kinds, strict=True) if own == kind) for kind in KINDS}
            rows.append({"recipe": name, "form": form, "replays": replays, "different": sum(found), "by_kind": by_kind})
    k, f = SIDES
    return {
        "device": torch.cuda.get_device_name(),
        "seed": seed,
        "shape": {"T": TOKENS, "k": CHOICES, "G": EXPERTS, "K": k, "F": f},
        "kinds": list(KINDS),
        "replays": replays,
        "layers": len(rows),
        "rows": rows,
        "faults": sum(row["different"] for row in rows),
    }
