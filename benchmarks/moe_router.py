"""A router by kernels beside torch's operations, a MoE layer with either, and activations that are fused and quantized.

python benchmarks/moe_router.py OUTPUT COMMIT

Everything that is compared takes turns in one process, on a CUDA device. Routers and activations run in CUDA graphs of
several calls, whose replays cost the host nothing; layers eagerly and as graphs of a step.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from replays import TURNS, Run, graph_of, in_turns
from torch import Tensor

import octavo
import octavo_torch as ot

ROUTERS: Mapping[str, tuple[int, int, int, dict[str, Any]]] = {
    "8192 x 128, k 8, softmax": (8192, 128, 8, {}),
    "8192 x 256, k 8, sigmoid, 4 of 8 groups, bias": (
        8192, 256, 8, {"score": "sigmoid", "groups": 8, "kept_groups": 4, "bias": True},
    ),
    "32768 x 512, k 16, softmax": (32768, 512, 16, {}),
    "8192 x 32, k 4, softmax": (8192, 32, 4, {}),
}  # fmt: skip
"""Tokens, experts, choices, and what else of a rule."""

ROWS, FEATURES, GROUPS = 32768, 2048, 32
CALLS, STEPS = 20, 4
NATIVE, COMPOSED = "torch-native", "torch-reference"


def routers(dtype: torch.dtype) -> dict[str, dict[str, float]]:
    """Forward, and forward and backward."""
    results = {}
    for name, (tokens, experts, k, rule) in ROUTERS.items():
        torch.manual_seed(0)
        logits = torch.randn(tokens, experts, device="cuda").to(dtype).requires_grad_()
        dweights = torch.randn(tokens, k, device="cuda")
        bias = torch.randn(experts, device="cuda") * 0.1 if rule.get("bias") else None
        choose = partial(ot.choose_experts, k=k, **{**rule, "bias": bias})

        def forward(choose: Any = choose, logits: Tensor = logits, backend: str = NATIVE) -> ot.Choice:
            with torch.no_grad():
                made: ot.Choice = choose(logits, backend=backend)
                return made

        def both(
            choose: Any = choose, logits: Tensor = logits, dweights: Tensor = dweights, backend: str = NATIVE
        ) -> tuple[Tensor, ...]:
            return torch.autograd.grad(choose(logits, backend=backend).weights, logits, dweights)

        graphs = {
            f"{backend} {way.__name__}": graph_of(partial(way, backend=backend), CALLS).replay
            for backend in (NATIVE, COMPOSED)
            for way in (forward, both)
        }
        results[name] = in_turns(graphs, CALLS)
        ours, theirs = forward(), forward(backend=COMPOSED)
        results[name]["tokens with other choices"] = int((ours.choices != theirs.choices).any(1).sum())
    return results


def layers() -> dict[str, dict[str, float]]:
    """Qwen3-30B's layer, forward and backward."""
    results: dict[str, dict[str, float]] = {}
    for recipe in (octavo.MXFP8(), octavo.BlockScaling(), octavo.HighPrecision()):
        layer = ot.MoE(128, 2048, 768, 8, recipe=recipe, dtype=torch.bfloat16, device="cuda", backend=NATIVE)
        x = torch.randn(8192, 2048, device="cuda").bfloat16().requires_grad_()
        dy = torch.randn(8192, 2048, device="cuda").bfloat16()

        def step(backend: str, layer: ot.MoE = layer, x: Tensor = x, dy: Tensor = dy) -> tuple[Tensor, ...]:
            logits = torch.nn.functional.linear(x.float(), layer.router.float())
            y = layer(x, ot.choose_experts(logits, layer.k, backend=backend))
            return torch.autograd.grad(y, [x, *layer.parameters()], dy)

        def eager(backend: str, step: Any = step) -> None:
            for _ in range(STEPS):
                step(backend)

        runs: dict[str, Run] = {
            f"router by {backend}, eager": partial(eager, backend) for backend in (NATIVE, COMPOSED)
        }
        for backend in (NATIVE, COMPOSED):
            runs[f"router by {backend}, graph"] = graph_of(partial(step, backend), STEPS).replay
        results[recipe.kind] = in_turns(runs, STEPS)
    return results


def activations() -> dict[str, dict[str, float]]:
    """Codes of both planes, with probabilities; backward's with their gradient."""
    sizes = torch.full((GROUPS,), ROWS // GROUPS, device="cuda")
    xs = [torch.randn(ROWS, 2 * FEATURES, device="cuda").mul_(2).bfloat16() for _ in range(3)]
    dys = [torch.randn(ROWS, FEATURES, device="cuda").bfloat16() for _ in range(3)]
    probs = torch.rand(ROWS, device="cuda")

    def run(recipe: octavo.Recipe, name: str, backward: bool) -> None:
        how: dict[str, Any] = {"activation": name, "probs": probs, "backend": NATIVE}
        spec = recipe.quantizer("dy" if backward else "x")
        assert spec is not None
        for x, dy in zip(xs, dys, strict=True):
            if backward:
                ot.dact_quantize(dy, x, spec, sizes, wanted=("dprobs",), **how)
            else:
                ot.act_quantize(x, spec, sizes, wanted=(), **how)

    return {
        f"{recipe.kind} {'backward' if backward else 'forward'}": in_turns(
            {
                name: graph_of(partial(run, recipe, name, backward), 1).replay
                for name in ("swiglu", "clamped_swiglu", "geglu_tanh")
            },
            len(xs),
        )
        for recipe in (octavo.MXFP8(), octavo.BlockScaling(), octavo.CurrentScaling())
        for backward in (False, True)
    }


def main() -> None:
    """Measure, and write the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("commit")
    given = parser.parse_args()
    record = {
        "command": f"python benchmarks/moe_router.py {given.output} {given.commit}",
        "commit": given.commit,
        "machine": {"gpu": torch.cuda.get_device_name()},
        "versions": {"torch": torch.__version__, "octavo-torch": ot.__version__},
        "turns": TURNS,
        "unit": "us",
        "routers, fp32 logits": routers(torch.float32),
        "routers, bf16 logits": routers(torch.bfloat16),
        "Qwen3-30B's MoE layer, 8192 tokens, forward and backward": layers(),
        f"activations of [{ROWS}, {2 * FEATURES}], {GROUPS} groups": activations(),
    }
    given.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
