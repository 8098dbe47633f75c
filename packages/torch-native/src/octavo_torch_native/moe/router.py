"""A router: the bound functions of octavo_registry.contract.moves, one launch each."""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor

import octavo_native
from octavo_registry.contract import RouterRule
from octavo_torch.plugin_api import CHOOSE_OPERATORS, rule_from, rule_text
from octavo_torch_native.arrays.launch import address, as_rows, submit
from octavo_torch_native.arrays.operators import define
from octavo_torch_native.quantizers.planes import DTYPE_NUMBERS

_choose_form, _gradient_form = CHOOSE_OPERATORS["choose_experts"], CHOOSE_OPERATORS["choose_gradient"]


@lru_cache(maxsize=1024)
def _rule(text: str) -> octavo_native.RouterRule:
    rule = rule_from(text)
    return octavo_native.RouterRule(
        k=rule.k,
        score=octavo_native.SCORES[rule.score],
        groups=rule.groups,
        kept_groups=rule.kept_groups,
        renormalize=rule.renormalize,
        scale=rule.scale,
    )


def _logits(rows: Tensor, stride: int) -> octavo_native.Logits:
    tokens, experts = rows.shape
    dtype = DTYPE_NUMBERS[rows.dtype]
    return octavo_native.Logits(data=address(rows), dtype=dtype, tokens=tokens, experts=experts, stride=stride)


def _choose(logits: Tensor, bias: Tensor | None, replay: Tensor | None, rule: str) -> tuple[Tensor, Tensor, Tensor]:
    choices, weights, counts = _choose_form.fake(logits, bias, replay, rule)
    rows, stride = as_rows(logits)
    bias = None if bias is None else bias.contiguous()
    replay = None if replay is None else replay.contiguous()
    arguments = {
        "rule": _rule(rule),
        "logits": _logits(rows, stride),
        "bias": address(bias),
        "replay": address(replay),
        "choices": address(choices),
        "weights": address(weights),
        "counts": address(counts),
    }
    submit(octavo_native.choose_experts, rows, arguments, recordable=False)
    return choices, weights, counts


def _choose_gradient(logits: Tensor, choices: Tensor, dweights: Tensor, rule: str) -> Tensor:
    (rows, stride), choices, dweights = as_rows(logits), choices.contiguous(), dweights.contiguous()
    dlogits: Tensor = _gradient_form.fake(rows).contiguous()
    arguments = {
        "rule": _rule(rule),
        "logits": _logits(rows, stride),
        "choices": address(choices),
        "dweights": address(dweights),
        "dlogits": address(dlogits),
    }
    submit(octavo_native.choose_gradient, rows, arguments, recordable=False)
    return dlogits


_chosen = define(_choose_form.schema, _choose, _choose_form.fake)
_gradient = define(_gradient_form.schema, _choose_gradient, _gradient_form.fake)


def choose_experts(
    logits: Tensor, bias: Tensor | None, replay: Tensor | None, rule: RouterRule, /
) -> tuple[Tensor, Tensor, Tensor]:
    """Choices, weights and counts; see octavo_torch.choose_experts."""
    return _chosen(logits, bias, replay, rule_text(rule))


def choose_gradient(logits: Tensor, choices: Tensor, dweights: Tensor, rule: RouterRule, /) -> Tensor:
    """The gradient of the logits from that of the weights."""
    return _gradient(logits, choices, dweights, rule_text(rule))
