"""The charts of the performance page, drawn from the measurements in benchmarks/results."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from bars import Chart, by_group, draw
from workspace import ROOT

GEMM, DEEPGEMM = "gemm-h200-2026-11-30", "gemm-deepgemm-h200-2026-11-28"
MOE, STEP, QUANTIZE = (f"{name}-h200-2026-11-30" for name in ("moe", "step", "quantize"))
PEERS = "moe-peers-h200-2026-11-30"
BATCHED = "gemm-batched-h200-2026-11-22"
THEIRS = ("torch's bf16, index_add", "torch's bf16, gathered and summed")
KINDS = {"bf16": "tool", "delayed": "torch", "block": "jax", "mxfp8": "native"}
SHAPE = [32768, 7168]
QUANTIZERS = {  # case of the file: what the chart calls it
    "current row": "current: rows",
    "current row+col": "current: both",
    "per-row row": "row: rows",
    "per-row row+col": "row: both",
    "block row": "block: rows",
    "block row+col": "block: both",
    "swiglu + block row+col": "SwiGLU + block: both",
    "mxfp8 row": "MXFP8: rows",
    "mxfp8 row+col": "MXFP8: both",
    "nvfp4 row": "NVFP4: rows",
    "nvfp4 row+col": "NVFP4: both",
}


@cache
def record(name: str) -> dict[str, Any]:
    """A file of `benchmarks/results`."""
    measured: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    return measured


def _rows(name: str, table: str = "rows") -> list[dict[str, Any]]:
    return list(record(name)[table])


def _source(name: str) -> str:
    return f"One H200; longer is faster. benchmarks/results/{name}.json"


def moe() -> str:
    """Whole MoE layers against torch's own grouped GEMM."""
    fastest: dict[str, float] = {}
    for row in _rows(MOE):
        if row["kind"] in THEIRS:
            fastest[row["name"]] = min(row["ms"], fastest.get(row["name"], row["ms"]))
    values = [
        (row["name"], row["kind"], fastest[row["name"]] / row["ms"]) for row in _rows(MOE) if row["kind"] in KINDS
    ]
    title = "MoE layer in torch, forward and backward, against bf16 on torch._grouped_mm"
    return draw(Chart(title, _source(MOE), KINDS, by_group(values), "{:.2f}x", (1.0, "torch, bf16")))


def moe_peers() -> str:
    """MoE layers from given choices beside SonicMoE's, in one process."""
    ways = {
        "torch _grouped_mm, bf16": "torch, bf16",
        "octavo bf16, standard": "octavo, bf16",
        "octavo fp8-block, standard": "octavo, block",
        "octavo fp8-block, wgrad in bf16, standard": "wgrad in bf16",
        "octavo fp8-block, standard, codes given": "given codes",
    }
    values = []
    for row in _rows(PEERS):
        sides = record(PEERS)["shapes"][row["shape"]]
        layer = f"{sides['experts']} of {sides['hidden_features']}, top {sides['k']}"
        if row["way"] in ways:
            values.append((layer, ways[row["way"]], 1 / row["of_peer"]))
    series = dict(zip(ways.values(), ("tool", "base", "jax", "check", "torch"), strict=True))
    title = "MoE layer, forward and backward, against SonicMoE's in bf16"
    return draw(Chart(title, _source(PEERS), series, by_group(values), "{:.2f}x", (1.0, "SonicMoE, bf16")))


def step() -> str:
    """One grouped linear layer against its own bf16."""
    ours = {(row["name"], row["kind"]): row["ms"] for row in _rows(STEP) if row["framework"] == "torch"}
    series = {kind: family for kind, family in KINDS.items() if kind != "bf16"}
    values = [(name, kind, ours[name, "bf16"] / ms) for (name, kind), ms in ours.items() if kind in series]
    title = "Grouped linear layer, forward and backward, against the same layer in bf16"
    return draw(Chart(title, _source(STEP), series, by_group(values), "{:.2f}x", (1.0, "bf16")))


def gemm() -> str:
    """The forward product of each published model, ours and torch's."""
    shown = {"bf16": "octavo bf16", "block": "octavo block", "row": "octavo row"}
    peers = {"bf16": ("grouped_mm", "torch bf16"), "row": ("scaled_grouped_mm exact", "torch per row")}
    values = []
    for row in _rows(GEMM):
        case = row["case"]
        if row["gemm"] != "fprop" or row["sizes"] != "even" or case not in shown:
            continue
        values.append((row["name"], shown[case], row["tflops"]))
        peer, label = peers.get(case, ("", ""))
        if peer in row["peer_ratios"]:  # of their turns, which alone have the same clocks
            values.append((row["name"], label, row["tflops"] / row["peer_ratios"][peer]))
    series = {
        "torch bf16": "tool",
        "octavo bf16": "base",
        "torch per row": "check",
        "octavo row": "torch",
        "octavo block": "jax",
    }
    full = {name: group for name, group in by_group(values).items() if len(group) == len(series)}
    title = "Forward product with exact sums, TFLOP/s"
    return draw(Chart(title, _source(GEMM), series, full, "{:.0f}"))


def deepgemm() -> str:
    """GEMMs in bf16 and in block scaling against DeepGEMM's, which took turns with them."""
    shown = {
        ("bf16", "fprop"): "bf16: fprop",
        ("bf16 += fp32", "wgrad"): "bf16: wgrad",
        ("block", "fprop"): "block: fprop",
        ("block", "dgrad"): "block: dgrad",
        ("block += fp32", "wgrad"): "block: wgrad",
    }
    names = {tuple(row["shape"]): row["name"] for row in _rows(GEMM)}
    values = [
        (names[tuple(row["shape"])], shown[row["case"], row["gemm"]], ratio)
        for row in _rows(DEEPGEMM)
        for peer, ratio in row["peer_ratios"].items()
        if peer.startswith("DeepGEMM") and (row["case"], row["gemm"]) in shown
    ]
    series = dict(zip(shown.values(), ("base", "tool", "jax", "check", "torch"), strict=True))
    title = "Rate of grouped GEMMs against DeepGEMM's; wgrad is added to fp32"
    return draw(Chart(title, _source(DEEPGEMM), series, by_group(values), "{:.2f}x", (1.0, "DeepGEMM")))


def quantize() -> str:
    """The quantizers against a copy of the same bytes."""
    found = {
        row["case"]: row["ratio"] for row in _rows(QUANTIZE) if row["shape"] == SHAPE and row["grouping"] == "8 even"
    }
    values = {name: {"rate": found[case]} for case, name in QUANTIZERS.items()}
    title = "Quantizers at 32768 x 7168: rate of their bytes, a copy's = 1"
    return draw(Chart(title, _source(QUANTIZE), {"rate": "base"}, values, "{:.2f}", (1.0, "a copy")))


def over_ranks() -> str:
    """MoE layers with experts over two GPUs against one GPU with as many tokens."""
    models = {"Qwen3-30B": "qwen3-30b", "Mixtral": "mixtral", "DSv3": "dsv3"}
    ways = {("bf16", "collective"): "bf16, NCCL", ("bf16", "peer"): "bf16, peer memory"}
    ways |= {("block", "collective"): "block, NCCL", ("block", "peer"): "block, peer memory"}
    values = []
    for name, file in models.items():
        values += [
            (name, ways[row["kind"], row["route"]], row["alone_us"]["median"] / row["us"]["median"])
            for row in _rows(f"ep-torch-{file}-h200-2026-11-30")
            if row["way"] == "sums" and not row["payload"]
        ]
    series = dict(zip(ways.values(), ("tool", "base", "check", "jax"), strict=True))
    source = "Two H200s, sums per rank; longer is faster. benchmarks/results/ep-torch-*-h200-2026-11-30.json"
    title = "MoE layer over two GPUs against one GPU with as many tokens"
    return draw(Chart(title, source, series, by_group(values), "{:.2f}x", (1.0, "one GPU")))


CHARTS = {
    "speed-moe": moe,
    "speed-over-ranks": over_ranks,
    "speed-moe-peers": moe_peers,
    "speed-step": step,
    "speed-gemm": gemm,
    "speed-deepgemm": deepgemm,
    "speed-quantize": quantize,
}
