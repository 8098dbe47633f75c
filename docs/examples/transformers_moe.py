"""Trains MoE models of Hugging Face transformers through Octavo's adapter, beside transformers' own grouped_mm.

    python docs/examples/transformers_moe.py qwen3-moe
    python docs/examples/transformers_moe.py gpt-oss --recipe mxfp8 --recipe block --output gpt-oss.json
    python docs/examples/transformers_moe.py qwen3-moe --full --layers 4 --batch 4 --length 2048 --steps 50

Without `--full` a tiny model of the same kind runs anywhere; with it every size is the published model's, of which
`--layers` layers are built. All ways start from the same weights and see the same tokens: a Markov chain's, so that
there is something to learn. transformers 5.17 or later has to be installed.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import octavo
import octavo_torch
from octavo_torch.adapters.transformers import register

TINY = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "num_experts_per_tok": 2, "max_position_embeddings": 4096,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # Qwen3-30B-A3B
    "qwen3-moe": (
        "Qwen3Moe",
        {**TINY, "moe_intermediate_size": 96, "num_experts": 8},
        {
            "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
            "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
            "num_experts_per_tok": 8, "max_position_embeddings": 40960,
        },
    ),
    # gpt-oss-20b
    "gpt-oss": (
        "GptOss",
        {**TINY, "num_local_experts": 8, "sliding_window": 32},
        {
            "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64,
            "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4,
            "max_position_embeddings": 131072, "sliding_window": 128,
        },
    ),
}  # fmt: skip
"""Class, a tiny configuration, and the published model's."""


def build(kind: str, sizes: dict[str, Any], options: argparse.Namespace) -> Any:
    """A model of a class with random weights in bf16, on the device."""
    config = getattr(transformers, f"{kind}Config")(**sizes, num_hidden_layers=options.layers)
    torch.manual_seed(options.seed)
    with torch.device(options.device):
        how = {} if options.attention is None else {"attn_implementation": options.attention}
        model = getattr(transformers, f"{kind}ForCausalLM")._from_config(config, dtype=torch.bfloat16, **how)
    return model.train()


def batches(options: argparse.Namespace, vocabulary: int) -> list[Tensor]:
    """`--steps` of tokens [B, L]: each token has four successors, drawn once."""
    generator = torch.Generator().manual_seed(options.seed)
    known = min(vocabulary, 4096)
    successors = torch.randint(known, (known, 4), generator=generator)
    made = []
    for _ in range(options.steps):
        tokens = torch.randint(known, (options.batch, options.length), generator=generator)
        turns = torch.randint(4, tokens.shape, generator=generator)
        for position in range(1, options.length):
            tokens[:, position] = successors[tokens[:, position - 1], turns[:, position]]
        made.append(tokens.to(options.device))
    return made


def finish(device: torch.device) -> None:
    """Waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def train(model: Any, data: list[Tensor], options: argparse.Namespace) -> dict[str, Any]:
    """Loss and time of every step, and the largest memory that a step took; None on a CPU, which does not say."""
    device, losses, times = torch.device(options.device), [], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, fused=device.type == "cuda")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for tokens in data:
        finish(device)
        start = time.perf_counter()
        loss = model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        finish(device)
        times.append(time.perf_counter() - start)
    step = statistics.median(times[min(options.warm, len(times) - 1) :])
    return {
        "tokens_per_second": options.batch * options.length / step,
        "step_ms": step * 1e3,
        "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        "losses": [float(loss) for loss in losses],
    }


def experts_alone(model: Any, options: argparse.Namespace) -> float:
    """Milliseconds of one layer's experts, forward and backward, on a batch's number of tokens."""
    experts, config = model.model.layers[0].mlp.experts, model.config
    device, tokens = torch.device(options.device), options.batch * options.length
    generator = torch.Generator(device).manual_seed(options.seed)
    x = torch.randn(tokens, config.hidden_size, device=device, generator=generator).bfloat16().requires_grad_()
    logits = torch.randn(tokens, experts.num_experts, device=device, generator=generator)
    weights, choices = logits.softmax(-1).topk(config.num_experts_per_tok, -1)
    weights = weights.bfloat16().requires_grad_()
    leaves = [x, weights, *experts.parameters()]
    times = []
    for _ in range(options.warm + 10):
        finish(device)
        start = time.perf_counter()
        y = experts(x, choices, weights)
        torch.autograd.grad(y, leaves, torch.ones_like(y))
        finish(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[options.warm :]) * 1e3


def ways(options: argparse.Namespace) -> dict[str, Callable[[], str]]:
    """What may serve the experts, and how each becomes an experts implementation of transformers."""
    made: dict[str, Callable[[], str]] = {"grouped_mm": lambda: "grouped_mm"}
    for name in options.recipe or ("bf16", "mxfp8"):
        recipe = octavo.recipe(name)
        made[f"octavo {name}"] = lambda recipe=recipe, name=name: register(  # type: ignore[misc]
            recipe, form=options.form, weight_codes=options.weight_codes, name=f"octavo-{name}"
        )
    return made


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Every way in turn, each from a fresh model with the same weights."""
    device, rows = torch.device(options.device), []
    kind, tiny, full = MODELS[options.model]
    for name, implementation in ways(options).items():
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            model = build(kind, full if options.full else tiny, options)
            model.set_experts_implementation(implementation())
            result = train(model, batches(options, model.config.vocab_size), options)
            result["experts_ms"] = experts_alone(model, options)
            parameters = sum(value.numel() for value in model.parameters())
            del model
            if device.type == "cuda":
                torch.cuda.empty_cache()
        rows.append({"way": name, **result})
        peak = "" if result["peak_bytes"] is None else f"{result['peak_bytes'] / 2**30:8.2f} GiB"
        print(
            f"{name:16} {result['tokens_per_second']:10.0f} tokens/s {result['step_ms']:9.1f} ms {peak}  experts of a "
            f"layer {result['experts_ms']:8.2f} ms  loss {result['losses'][0]:.4f} -> {result['losses'][-1]:.4f}",
            flush=True,
        )
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {
        "model": options.model,
        "options": {key: value for key, value in vars(options).items() if key != "output"},
        "parameters": parameters,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "versions": {"python": platform.python_version(), "octavo-torch": octavo_torch.__version__, **versions},
        "rows": rows,
    }


def main() -> None:
    """Reads the command line, trains, prints a line a way and writes `--output`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--full", action="store_true", help="the published model's sizes")
    parser.add_argument("--recipe", action="append", help="a recipe's name; may be repeated; default bf16 and mxfp8")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=2, help="sequences of a step")
    parser.add_argument("--length", type=int, default=64, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warm", type=int, default=2, help="steps that are not timed")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--form", default="standard", help="what moe_mlp keeps for the backward")
    parser.add_argument("--weight-codes", default="keep", help='"keep" or "remake"')
    parser.add_argument("--attention", help="an attention implementation; default transformers' choice")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help="a JSON file for the results")
    options = parser.parse_args()
    record = run(options)
    if options.output is not None:
        options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
