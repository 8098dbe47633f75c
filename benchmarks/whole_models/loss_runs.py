"""Loss over some hundred steps of real text in every way, from the same weights on the same batches of each seed."""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from library_text import read_text
from torch import Tensor
from transformers_moe import MODELS, build
from ways import THEIRS, Served

import octavo_torch
from octavo_cli.train.data import Corpus

COMMON = {
    "vocab_size": 256, "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    "num_experts_per_tok": 4, "max_position_embeddings": 1024,
}  # fmt: skip
SMALL: dict[str, dict[str, Any]] = {
    "qwen3-moe": {**COMMON, "intermediate_size": 512, "moe_intermediate_size": 256, "num_experts": 32},
    "gpt-oss": {**COMMON, "intermediate_size": 256, "num_local_experts": 32, "sliding_window": 128},
}
"""A published model's kind in sizes whose steps take milliseconds."""
HELD_OUT = 128
WINDOW = 20
WARM = 3
"""Steps outside of a CUDA graph, which the first run of every kernel needs."""


def step_of(model: Any, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Tensor]:
    """A function of tokens that trains and returns the loss; after some steps a CUDA graph, where there is a GPU."""
    kept: dict[str, Any] = {"seen": 0}

    def eager(tokens: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss: Tensor = model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    def step(tokens: Tensor) -> Tensor:
        kept["seen"] += 1
        if not tokens.is_cuda:
            return eager(tokens)
        if kept["seen"] <= WARM:
            aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                loss = eager(tokens)
            torch.cuda.current_stream().wait_stream(aside)
            return loss
        if "graph" not in kept:
            optimizer.zero_grad(set_to_none=True)
            kept["tokens"], kept["graph"] = tokens.clone(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(kept["graph"]):
                kept["loss"] = eager(kept["tokens"])
        kept["tokens"].copy_(tokens)
        kept["graph"].replay()
        result: Tensor = kept["loss"]
        return result

    return step


def train(way: str, seed: int, corpus: Corpus, options: argparse.Namespace) -> dict[str, Any]:
    """One run: mean loss of every 20 steps, and the held-out loss after the last one."""
    device = torch.device(options.device)
    options.seed = seed
    kind, tiny, _ = MODELS[options.model]
    sizes = {**tiny, "vocab_size": 256} if options.quick else SMALL[options.model]
    model = build(kind, sizes, options)
    Served(model).by(way)
    optimizer = octavo_torch.AdamW(model.parameters(), lr=options.lr, capturable=True)
    step, losses = step_of(model, optimizer), torch.zeros(options.steps, device=device)
    batches = [corpus.batch(seed, number, options.batch, options.length - 1) for number in range(options.steps)]
    start = time.perf_counter()
    for number, tokens in enumerate(batches):
        losses[number].copy_(step(torch.from_numpy(tokens).to(device).long()))
    means = losses.view(-1, min(WINDOW, options.steps)).mean(1).tolist()
    seconds = time.perf_counter() - start
    held_out = torch.from_numpy(corpus.evaluation(HELD_OUT, options.length - 1)).to(device).long()
    parts = held_out.split(options.batch)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        final = torch.stack([model(part, labels=part, use_cache=False).loss for part in parts]).mean()
    return {
        "way": way,
        "seed": seed,
        "train_loss": [round(value, 5) for value in means],
        "held_out_loss": round(float(final), 6),
        "ms_per_step": round(seconds / options.steps * 1e3, 3),
    }


def gaps(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How far each way's held-out loss is above grouped_mm's in per cent: mean and standard deviation over seeds."""
    held_out = {(row["way"], row["seed"]): row["held_out_loss"] for row in rows}
    found = []
    for way in dict.fromkeys(row["way"] for row in rows if row["way"] != THEIRS):
        each = [
            100 * (loss / held_out[THEIRS, seed] - 1)
            for (name, seed), loss in held_out.items()
            if name == way and (THEIRS, seed) in held_out
        ]
        found.append(
            {
                "way": way,
                "percent": round(statistics.fmean(each), 4),
                "spread_percent": round(statistics.stdev(each), 4) if len(each) > 1 else None,
                "per_seed_percent": [round(value, 4) for value in each],
            }
        )
    return found


def measure(options: argparse.Namespace, rows: list[dict[str, Any]], save: Callable[[dict[str, Any]], None]) -> None:
    """All ways of each seed but those that `rows` has; `save` is called after every run with what there is."""
    corpus, began, longest = read_text(options.text, options.length), time.perf_counter(), 0.0
    done = {(row["way"], row["seed"]) for row in rows}
    for seed in range(options.seeds):
        for way in (THEIRS, *options.way):
            start = time.perf_counter()
            if (way, seed) in done or start - began + longest >= options.seconds:
                continue
            rows.append(train(way, seed, corpus, options))
            gc.collect()
            if options.device != "cpu":
                torch.cuda.empty_cache()
            longest = max(longest, time.perf_counter() - start)
            print({key: value for key, value in rows[-1].items() if key != "train_loss"}, flush=True)
            text = {"source": corpus.source, "sha256": corpus.sha256}
            sizes = "tiny" if options.quick else {**SMALL[options.model], "layers": options.layers}
            save({"sizes": sizes, "text": text, "loss_window": WINDOW, "gaps": gaps(rows), "rows": rows})
