"""Tokens per second, the experts' share of a step and the peak of memory, of every way in turns on one model."""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from spans import Mark, Spans
from transformers_moe import MODELS, batches, build
from ways import THEIRS, Served

import octavo_torch

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "torch": lambda parameters, fused: torch.optim.AdamW(parameters, lr=1e-5, fused=fused),
    "octavo": lambda parameters, fused: octavo_torch.AdamW(
        parameters, lr=1e-5, master_dtype=torch.bfloat16, state_bits=8
    ),
}
"""torch's AdamW with moments in bf16, and ours with moments in 8 bits; masters are the bf16 weights in both."""


class Steps:
    """Training steps of a model, measured."""

    def __init__(self, model: Any, data: list[torch.Tensor], device: torch.device, compiled: bool) -> None:
        self.model, self.data, self.device, self.number = model, data, device, 0
        self.served = Served(model)
        # marks on the stream would cut the graphs of compiled layers
        self.spans = None if compiled else Spans((layer.mlp.experts for layer in model.model.layers), device)
        if compiled:
            for layer in model.model.layers:
                layer.compile()

    def step(self, optimizer: torch.optim.Optimizer) -> dict[str, float]:
        """Milliseconds of a step, of the experts in it unless layers are compiled, and of the optimizer."""
        tokens = self.data[self.number % len(self.data)]
        self.number += 1
        start, before, end = (Mark(self.device) for _ in range(3))
        start.set()
        self.model(tokens, labels=tokens, use_cache=False).loss.backward()
        before.set()
        optimizer.step()
        optimizer.zero_grad()
        end.set()
        experts = {} if self.spans is None else {"experts_ms": self.spans.take()}
        return {"step_ms": start.until(end), **experts, "optimizer_ms": before.until(end)}

    def turn(self, optimizer: torch.optim.Optimizer, count: int) -> tuple[list[dict[str, float]], int | None]:
        """`count` steps, after one that is not measured, and the peak of memory in them; None on a CPU."""
        self.step(optimizer)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        measured = [self.step(optimizer) for _ in range(count)]
        return measured, torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Rows by optimizer and way. A way or an optimizer that runs out of memory says so, and the others go on."""
    device = torch.device(options.device)
    kind, tiny, full = MODELS[options.model]
    sizes = dict(tiny if options.quick else full)
    sizes["vocab_size"] = options.vocabulary or sizes["vocab_size"]
    model = build(kind, sizes, options)
    steps = Steps(model, batches(options, model.config.vocab_size), device, options.compiled)
    rows = []
    for name in options.optimizer:
        optimizer = OPTIMIZERS[name](model.parameters(), fused=device.type == "cuda")
        rows += in_turns(steps, optimizer, (THEIRS, *options.way), options, name)
        compare(rows, name)
        del optimizer
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return {
        "sizes": {**sizes, "layers": options.layers},
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "attention": model.config._attn_implementation,
        "rows": rows,
    }


def compare(rows: list[dict[str, Any]], name: str) -> None:
    """Adds each row's ratios to grouped_mm with the same optimizer, and with the first one; prints an optimizer's."""
    measured = [row for row in rows if "error" not in row]
    theirs = {row["optimizer"]: row for row in measured if row["way"] == THEIRS}
    for row in measured:
        for key, base in (
            ("over_grouped_mm", theirs.get(row["optimizer"])),
            ("over_first", theirs.get(rows[0]["optimizer"])),
        ):
            if base is not None:
                row[key] = {"tokens_per_second": round(base["step_ms"] / row["step_ms"], 4)}
                for figure in ("experts_ms", "experts_share", "peak_bytes"):
                    if row.get(figure):
                        row[key][figure.removesuffix("_bytes")] = round(row[figure] / base[figure], 4)
    for row in rows:
        if row["optimizer"] == name:
            print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)


def in_turns(
    steps: Steps, optimizer: torch.optim.Optimizer, ways: Sequence[str], options: argparse.Namespace, name: str
) -> list[dict[str, Any]]:
    """A row for each way; every second turn goes backwards."""
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    peaks: dict[str, int | None] = dict.fromkeys(ways)
    failed: dict[str, str] = {}
    for turn in range(options.turns):
        for way in ways[:: -1 if turn % 2 else 1]:
            if way in failed:
                continue
            steps.served.by(way)
            try:
                measured, peaks[way] = steps.turn(optimizer, options.calls)
                found[way] += measured
            except torch.OutOfMemoryError as error:
                failed[way] = str(error).split(". ")[0]
            if way in failed:
                optimizer.zero_grad()
                gc.collect()
                torch.cuda.empty_cache()
    rows: list[dict[str, Any]] = []
    for way in ways:
        row: dict[str, Any] = {"optimizer": name, "way": way}
        if way in failed:
            rows.append({**row, "error": failed[way]})
            continue
        times = {key: round(statistics.median(each[key] for each in found[way]), 3) for key in found[way][0]}
        row |= times | {"tokens_per_second": round(options.batch * options.length / times["step_ms"] * 1e3)}
        if "experts_ms" in times:
            row["experts_share"] = round(times["experts_ms"] / times["step_ms"], 4)
        row["peak_bytes"] = peaks[way]
        rows.append(row)
    return rows
