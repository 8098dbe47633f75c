"""LoRA of a MoE model of transformers: PEFT on bf16 weights, and Octavo on frozen codes; tokens per second, memory.

    python benchmarks/lora.py --output lora.json                                  # tiny, anywhere
    python benchmarks/lora.py --full --batch 4 --length 2048 --output lora.json   # Qwen3-30B-A3B's sizes on one GPU

Every way trains the same PEFT adapters (target_parameters gate_up_proj and down_proj of all experts) of a Qwen3-MoE
with random weights, with activation checkpointing and AdamW, on the same random tokens:

    grouped_mm     weights in bf16, transformers' grouped_mm, PEFT as it is
    octavo RECIPE  experts as codes of the recipe alone, Octavo's products, PEFT through octavo_torch.adapters.peft
    octavo packed  experts as MXFP4 alone, expanded in each product for the first recipe

Experts are drawn and quantized a layer at a time, so that no way needs more memory to be built than to run. A way that
runs out of memory says so, and the others go on. Needs transformers and peft.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from torch import Tensor, nn

import octavo_torch
from octavo_torch import PackedWeight
from octavo_torch.adapters.frozen import freeze_experts
from octavo_torch.adapters.peft import prepare

TINY = {
    "vocab_size": 128, "hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128, "num_experts": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_experts_per_tok": 2,
}  # fmt: skip
FULL = {  # Qwen3-30B-A3B
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
}  # fmt: skip
STD = 0.02


def build(way: str, options: argparse.Namespace) -> Any:
    """The model on the device with random weights, its experts as the way has them."""
    sizes = FULL if options.full else TINY
    config = transformers.Qwen3MoeConfig(**sizes, num_hidden_layers=options.layers, tie_word_embeddings=False)
    how = {} if options.attention is None else {"attn_implementation": options.attention}
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM._from_config(config, dtype=torch.bfloat16, **how)
    torch.manual_seed(options.seed)
    for module in model.modules():
        if (
            hasattr(module, "gate_up_proj")
            and hasattr(module, "down_proj")
            and not isinstance(module.down_proj, nn.Module)
        ):
            experts(module, way, options)
            continue
        for name, parameter in list(module.named_parameters(recurse=False)):
            value = torch.ones(parameter.shape, dtype=torch.bfloat16, device=options.device)
            value = value if "norm" in type(module).__name__.lower() else value.normal_(std=STD)
            setattr(module, name, nn.Parameter(value))
    # what is left on the meta device is rotary embeddings' buffers, which are computed from the configuration
    rotary = model.model.rotary_emb
    with torch.device(options.device):
        model.model.rotary_emb = type(rotary)(config)
    if way == "grouped_mm":
        model.set_experts_implementation("grouped_mm")
    return model.train()


@torch.no_grad()
def experts(module: Any, way: str, options: argparse.Namespace) -> None:
    """Draws one layer's experts, and makes of them what the way keeps."""
    for name in ("gate_up_proj", "down_proj"):
        shape = getattr(module, name).shape
        value = torch.empty(shape, dtype=torch.bfloat16, device=options.device).normal_(std=STD)
        setattr(module, name, nn.Parameter(value))
    if way == "grouped_mm":
        return
    recipe = options.recipe[0] if way == "packed" else way
    form = "standard"  # layers are recomputed whole
    freeze_experts(module, recipe, form=form)
    if way != "packed":
        return
    for name in ("gate_up_proj", "down_proj"):
        groups, rows, columns = getattr(module, name).shape
        frozen = getattr(module, name)
        blocks = torch.randint(256, (groups, rows, columns // 2), dtype=torch.uint8, device=options.device)
        # two binades of scales, which codes of any recipe hold; values are near 2^-6, as those that are drawn
        scales = torch.randint(119, 121, (groups, rows, columns // 32), dtype=torch.uint8, device=options.device)
        packed = PackedWeight(blocks, scales, frozen.recipe, torch.bfloat16)
        setattr(module, name, nn.Parameter(packed, requires_grad=False))


def adapted(model: Any, way: str, options: argparse.Namespace) -> Any:
    """The model with PEFT's adapters, which are in bf16, and every layer recomputed in the backward."""
    config = peft.LoraConfig(
        r=options.rank, lora_alpha=2 * options.rank, target_modules=[],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
    )  # fmt: skip
    if way != "grouped_mm":
        config = prepare(config, model)
    made = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    model.config.use_cache = False
    made.enable_input_require_grads()
    made.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return made


def finish(device: torch.device) -> None:
    """Waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(way: str, options: argparse.Namespace) -> dict[str, Any]:
    """Trains `--steps` steps; every adapter must receive a gradient in the first."""
    device = torch.device(options.device)
    model = adapted(build(way, options), way, options)
    own = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(own, lr=options.lr, fused=device.type == "cuda")
    generator = torch.Generator().manual_seed(options.seed)
    vocabulary, losses, times, untrained = model.config.vocab_size, [], [], None
    finish(device)
    held = torch.cuda.memory_allocated(device) if device.type == "cuda" else None
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(options.steps):
        tokens: Tensor = torch.randint(vocabulary, (options.batch, options.length), generator=generator).to(device)
        finish(device)
        start = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        if untrained is None:  # A's gradient is zero as long as B is
            untrained = sum(parameter.grad is None for parameter in own)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        finish(device)
        times.append(time.perf_counter() - start)
    step = statistics.median(times[min(options.warm, len(times) - 1) :])
    return {
        "tokens_per_second": options.batch * options.length / step,
        "step_ms": step * 1e3,
        "held_bytes": held,
        "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        "trained_parameters": sum(parameter.numel() for parameter in own),
        "parameters_without_gradient": untrained,
        "losses": [float(loss) for loss in losses],
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Every way in turn."""
    device, rows = torch.device(options.device), []
    for way in ("grouped_mm", *options.recipe, "packed"):
        name = way if way == "grouped_mm" else f"octavo {way}"
        row: dict[str, Any] = {"way": name}
        try:
            row |= measure(way, options)
        except torch.OutOfMemoryError as error:
            row["error"] = str(error).split(". ")[0]
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        rows.append(row)
        if "error" in row:
            print(f"{name:20} {row['error']}", flush=True)
            continue
        first = rows[0].get("tokens_per_second")
        ratio = f"{row['tokens_per_second'] / first:5.2f}x" if first else ""
        peak = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e9:7.2f} GB"
        print(
            f"{name:20} {row['tokens_per_second']:10.0f} tokens/s {ratio} {row['step_ms']:9.1f} ms {peak}  "
            f"loss {row['losses'][0]:.4f} -> {row['losses'][-1]:.4f}",
            flush=True,
        )
    return {
        "model": "Qwen3-30B-A3B" if options.full else "tiny",
        "options": {key: value for key, value in vars(options).items() if key != "output"},
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "versions": {
            "python": platform.python_version(), "torch": torch.__version__, "peft": peft.__version__,
            "transformers": transformers.__version__, "octavo-torch": octavo_torch.__version__,
        },
        "rows": rows,
    }  # fmt: skip


def main() -> None:
    """Reads the command line, measures, prints a line a way and writes `--output`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="Qwen3-30B-A3B's sizes")
    parser.add_argument("--layers", type=int, help="default 48 with --full, else 2")
    parser.add_argument("--recipe", action="append", help="a recipe's name; may be repeated; default fp8-block")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--batch", type=int, default=2, help="sequences of a step")
    parser.add_argument("--length", type=int, default=64, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warm", type=int, default=2, help="steps that are not timed")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--attention", help="an attention implementation; default transformers' choice")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help="a JSON file for the results")
    options = parser.parse_args()
    options.layers = options.layers or (48 if options.full else 2)
    options.recipe = options.recipe or ["fp8-block"]
    record = run(options)
    if options.output is not None:
        options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
