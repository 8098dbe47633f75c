"""The layers that scripts of this folder measure; the standard library alone, for some run in other environments."""

from __future__ import annotations

LINEAR: dict[str, tuple[int, int, int, int]] = {
    "Mixtral fc1": (8, 4096, 28672, 16384),
    "DSv3 fc1": (32, 7168, 4096, 32768),
    "DSv3 fc2": (32, 2048, 7168, 32768),
    "Qwen3-235B fc1": (16, 4096, 3072, 32768),
    "gpt-oss-120b fc1": (32, 2880, 5760, 32768),
    "Qwen3-30B fc1": (128, 2048, 1536, 65536),
}
"""Groups, in-features K, out-features N and rows M of a grouped linear layer."""

SHORT_SUMS: dict[str, tuple[int, int, int, int]] = {
    **{f"K {k}": (128, k, 4096, 131072) for k in (192, 256, 384, 512, 640, 768)},
    **{f"{tokens} tokens per group": (128, 2048, 1536, 128 * tokens) for tokens in (192, 256, 320, 384, 512, 640, 768)},
}
"""Layers whose fprop (the first) or wgrad (the others) adds up few K-blocks."""

MOE: dict[str, tuple[int, int, int, int, int]] = {
    "Qwen3-30B": (8192, 8, 128, 2048, 768),
    "DSv3, 32 of 256 experts": (4096, 8, 32, 7168, 2048),
    "16 choices of experts of 256": (32768, 16, 256, 4096, 256),
}
"""Tokens, choices of each, experts, in-features and hidden features of a MoE layer: the fields of a MoeShape."""
