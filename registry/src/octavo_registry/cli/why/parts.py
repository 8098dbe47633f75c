"""What an expert MLP or a whole MoE layer is composed of: its two layers, what is fused between them, moved rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import octavo_registry
from octavo import NoBackendError
from octavo.grouped_tensor import PLAIN
from octavo.quantizer import Operand
from octavo.recipe_base import GEMMS, Gemm
from octavo_registry.cli.why.question import MOE, Question
from octavo_registry.contract.cards import MOVES, Activated
from octavo_registry.contract.plan import Plan
from octavo_registry.contract.request import MoveRequest
from octavo_registry.dispatch.fusing import UNREAD, fusing
from octavo_registry.dispatch.layer_plan import LayerPlan, layer_rows
from octavo_registry.dispatch.layer_requests import activation_request, common_fields, quantize_request

_BEFORE, _AFTER = ("route", "permute_rows"), ("combine_rows", "dot_rows")
_BACKWARD = "dot_rows"
_TOKENS = "from tokens, whose rows are not written"
_WEIGHS_RESULTS = frozenset({"jax"})
"""The front ends whose MoE layers may weigh the experts' results, and do unless they are told otherwise."""
_FUSES_UNQUANTIZED = "torch"
"""The front end that asks for a fused activation where no GEMM reads codes, too."""


@dataclass(frozen=True, slots=True)
class Part:
    """One operation of a composition; `backend` is "" where the front end runs its framework's own operations."""

    operation: str
    backend: str
    recipe: str
    how: str


def compose_parts(question: Question, backend: Sequence[str] | None) -> list[Part]:
    """Every part in the order of a forward and backward; NoBackendError of the layer that nothing serves."""
    plans = {name: octavo_registry.plan_layer(layer, backend=backend) for name, layer in question.layers().items()}
    parts = [*_layer("fc1", plans["fc1"])]
    parts.append(_between("act_quantize", "x", question, plans["fc2"], backend))
    if question.layer.training:
        parts.append(_between("dact_quantize", "dy", question, plans["fc1"], backend))
    parts += _layer("fc2", plans["fc2"])
    if question.op != MOE:
        return parts
    of_tokens = dict.fromkeys(_of_tokens(plans), _TOKENS)
    if question.layer.framework in _WEIGHS_RESULTS and "fc2 quantize dy" in of_tokens:
        of_tokens["fc2 quantize dy"] += ", unless the choices' weights multiply it on the way"
    parts = [
        replace(part, how="; ".join(filter(None, (part.how, of_tokens[part.operation]))))
        if part.operation in of_tokens
        else part
        for part in parts
    ]
    before = [_move(op, question, backend) for op in _BEFORE]
    after = [_move(op, question, backend) for op in _AFTER if question.layer.training or op != _BACKWARD]
    return [*before, *parts, *after]


def _of_tokens(plans: Mapping[str, LayerPlan]) -> Iterator[str]:
    """The parts that read a MoE layer's tokens: products of no codes, and quantizers whose rows no product reads."""
    x, dy = plans["fc1"], plans["fc2"]
    products: tuple[tuple[str, LayerPlan, Operand, tuple[Gemm, ...]], ...] = (
        ("fc1", x, "x", GEMMS[:1]),
        ("fc1", x, "x", GEMMS[2:]),
        ("fc2", dy, "dy", GEMMS[1:]),
    )
    for layer, plan, operand, together in products:
        unquantized = [gemm for gemm in together if not plan.recipe.quantizes(gemm)]
        quantizer = dict(plan.quantizers)[f"quantize_{operand}"]
        offers = quantizer is not None and quantizer.bound.of_tokens is not None
        if not all(plan.reads_tokens(gemm, operand) for gemm in unquantized):
            continue
        if len(unquantized) == len(together):
            yield from (f"{layer} {gemm}" for gemm in together)
        elif offers:
            yield from (f"{layer} quantize {operand}", *(f"{layer} {gemm}" for gemm in unquantized))


def _layer(name: str, plan: LayerPlan) -> Iterator[Part]:
    for operation, backend, recipe, how in layer_rows(plan):
        yield Part(f"{name} {operation}", backend, recipe, how)


def _between(
    op: Activated, operand: Operand, question: Question, layer: LayerPlan, backend: Sequence[str] | None
) -> Part:
    """The activation or its gradient: fused with the quantizer of the layer's operand, or composed, and why."""
    quantizer = dict(layer.quantizers)[f"quantize_{operand}"]
    codes = quantizer is not None
    framework = question.layer.framework
    name = question.activation if op == "act_quantize" else f"{question.activation}'s gradient"
    if not codes and framework != _FUSES_UNQUANTIZED:
        return Part(name, "", "", f"composed of {framework}'s operations: nothing is quantized")
    chosen: Plan = layer.fprop if quantizer is None else quantizer
    quantize = quantize_request(layer.fprop.request, UNREAD, operand, (PLAIN, PLAIN))
    request = activation_request(quantize if quantizer is None else quantizer.request, op, question.activation)
    plan = fusing(partial(octavo_registry.plan, backend=backend), chosen, request, codes=codes)
    if isinstance(plan, str):
        return Part(name, "", "", f"composed of {framework}'s operations: {plan}")
    how = "fused with its quantizer" if codes else "in one pass, not quantized"
    return Part(name, plan.backend, chosen.request.kind, how)


def _move(op: str, question: Question, backend: Sequence[str] | None) -> Part:
    move = next(move for move in MOVES if move == op)
    # front ends ask so: a move has no group sizes
    of_rows = {"op": move, "out_dtype": question.layer.in_dtype, "sizes": "device"}
    request = MoveRequest(**common_fields(question.layer) | of_rows)
    try:
        return Part(op, octavo_registry.plan(request, backend=backend).backend, "", "")
    except NoBackendError:
        return Part(op, "", "", f"{question.layer.framework}'s own operations: no backend serves {op}")
