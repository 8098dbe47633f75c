"""gpt-oss's attention on scaled_dot_product_attention, whose softmax has no sinks: a sink is one more key.

transformers computes it in eager operations, which keep [heads, length, length] several times, with libraries that are
not always there, or compiled. Here q has one more feature, which is 1; the key at position 0 is zero but for that
feature, the sink, and its value is zero. A query at position 0, whose result is dropped, keeps the mask causal.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

NAME = "sinks_as_keys"
ALIGNMENT = 8
"""Features of a head come in multiples of it, for the fast kernels."""


def attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Results [batch, length, heads, features] of query [batch, heads, length, features], and no weights."""
    features, groups = query.shape[-1], module.num_key_value_groups
    key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    wide = (0, ALIGNMENT, 1, 0)  # more features, and a row in front
    ones = torch.zeros(ALIGNMENT, dtype=query.dtype, device=query.device)
    ones[:1] = 1
    query = torch.cat([query, ones.expand(*query.shape[:-1], -1)], -1)
    sinks = functional.pad((module.sinks / scaling)[:, None, None], (features, ALIGNMENT - 1))
    key = torch.cat([sinks.expand(len(key), -1, -1, -1).to(key.dtype), functional.pad(key, (0, ALIGNMENT))], 2)
    mask = None if attention_mask is None else functional.pad(attention_mask, (1, 0, 1, 0), value=True)
    y = functional.scaled_dot_product_attention(
        functional.pad(query, (0, 0, 1, 0)), key, functional.pad(value, wide), mask, is_causal=mask is None,
        scale=scaling,
    )  # fmt: skip
    return y[:, :, 1:, :features].transpose(1, 2).contiguous(), None


def register() -> str:
    """The name under which transformers then knows it."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME
