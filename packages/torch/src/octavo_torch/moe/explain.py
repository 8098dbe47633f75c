"""What a MoE layer runs: who chooses experts, moves rows, quantizes and multiplies, and where tokens are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

import octavo_registry as registry
from octavo.quantizer import Operand
from octavo.recipe_base import Gemm
from octavo.router import RouterRule
from octavo_registry.contract.plan import table
from octavo_registry.contract.request import Request
from octavo_registry.dispatch.fusing import unserved
from octavo_registry.dispatch.layer_plan import QuantizePlan
from octavo_torch.arrays.checks import HashableNames
from octavo_torch.arrays.per_group import Weights
from octavo_torch.compiler.graphs import wants_graph
from octavo_torch.dispatch.layer import Layer
from octavo_torch.linear.parameters import parameters_of
from octavo_torch.mlp.arguments import check_operands
from octavo_torch.mlp.plan import MlpPlan, RequiredGradients
from octavo_torch.moe import moe
from octavo_torch.moe.call import MoeCall, MoeOperands
from octavo_torch.moe.parallel.explain import ExchangePlan, explain_own_exchange
from octavo_torch.moe.plan import MoePlan
from octavo_torch.moe.rows.moves import choose_request, move_request
from octavo_torch.moe.tokens import gathers, takes_tokens

_TORCH = "torch's operations"
_OBSERVER = "an observer reads them"


class Served(NamedTuple):
    """One operation beside the experts' own; `backend` is "" where torch's operations do it. `why` it is so."""

    operation: str
    backend: str
    why: str


@dataclass(frozen=True)
class MoeReport:
    """What a MoE layer runs. Printable: a line for each operation.

    router    who chooses the experts
    moves     who routes tokens to experts, and permutes and combines their rows
    experts   the two layers and what is between them, as GroupedMLP.explain returns it
    tokens    pairs: what the tokens, or dy, are read for, and whether rows of them are written first and why
    exchange  with `ep` how tokens reach the other ranks; None without
    """

    router: Served
    moves: tuple[Served, ...]
    experts: MlpPlan
    tokens: tuple[tuple[str, str], ...]
    exchange: ExchangePlan | None

    def __str__(self) -> str:
        lines = [
            "router, whose logits are torch's product, summed in fp32",
            _rows(self.router),
            "moves",
            _rows(*self.moves),
        ]
        lines += [str(self.experts), "tokens", table(self.tokens)]
        if self.exchange is not None:
            lines += ["exchange", *(f"  {line}" for line in str(self.exchange).splitlines())]
        return "\n".join(lines)


class Given(NamedTuple):
    """A layer's parameters: of the experts, and the router [E, K]."""

    w1: Weights
    w2: Weights
    bias1: Weights | None
    bias2: Weights | None
    router: Tensor


def explain_moe(x: Tensor, given: Given, rule: RouterRule, call: MoeCall, adapted: bool) -> MoeReport:
    """What `call` of tokens x [T, K] runs, with all gradients that its operands require.

    adapted   the layer has adapters, and its operations run apart

    Nothing is computed, and nothing is sent. Raises as moe_mlp does.
    """
    first = parameters_of(given.w1, given.bias1, ("w1", "bias1"))
    second = parameters_of(given.w2, given.bias2, ("w2", "bias2"))
    name = check_operands(x, first.weight, second.weight, call.activation)
    experts = int(given.router.shape[0])
    logits = x.new_empty((0, experts), dtype=torch.float32)
    arrays = MoeOperands(x, first.weight, second.weight, logits, first.bias, second.bias)
    needs = [value is not None and value.requires_grad for value in arrays]
    of_choices = needs[0] or given.router.requires_grad
    needed = RequiredGradients(needs[0], needs[1], needs[2], needs[0] or needs[1] or of_choices or needs[4])
    plan = moe.resolve(call, name, arrays, needed)
    adapted_words = "rows are permuted first: the layer has adapters, and its products and its activation run apart"
    reads_bias2 = needs[5] or (of_choices and second.bias is not None)
    return MoeReport(
        _router(choose_request(logits, rule, wants_graph(x)), call.backend),
        tuple(_moves(x, call)),
        plan,
        (("x and dy", adapted_words),) if adapted else tuple(_tokens(call, reads_bias2)),
        None if call.ep is None else explain_own_exchange(call.recipe, call.ep, call.exchange, x),
    )


def _rows(*served: Served) -> str:
    return table((part.operation, part.backend or _TORCH, part.why) for part in served)


def _served(request: Request, backend: HashableNames) -> Served:
    decisions = registry.explain(request, backend=backend)
    chosen = next((one for one in decisions if one.verdict == "chosen"), None)
    if chosen is None:
        return Served(request.op, "", unserved(request, decisions))
    return Served(request.op, chosen.backend, chosen.reason)


def _router(request: Request, backend: HashableNames) -> Served:
    """One backend has both directions, or torch's operations do."""
    forward = _served(request, backend)
    if not forward.backend:
        return forward
    back = _served(replace(request, op="choose_gradient"), forward.backend)
    return forward if back.backend else Served(request.op, "", back.why)


def _moves(x: Tensor, call: MoeCall) -> Iterator[Served]:
    graph_safe, layers = wants_graph(x), call.moe.forward
    results = x.new_empty(0, dtype=layers.fc2.row_dtype)
    yield _served(move_request("route", x, layers.fc1.groups, graph_safe), call.backend)
    yield _served(move_request("permute_rows", x, None, graph_safe), call.backend)
    yield _served(move_request("combine_rows", results, None, graph_safe), call.backend)


def _tokens(call: MoeCall, reads_bias2: bool) -> Iterator[tuple[str, str]]:
    """What of the tokens is read in place, in the order of a forward and backward.

    reads_bias2   the gradient of fc2's bias, or of its weights, is computed
    """
    plan, fc1, fc2 = call.moe, call.moe.forward.fc1, call.moe.forward.fc2
    fc1_again = plan.backward.fc1
    watched = call.fc1.probe is not None
    read = "rows" if watched else plan.x_in_fprop
    if read == "rows":
        how = f"rows are permuted first: {_why_rows_of_x(call, watched)}"
    elif read == "tokens":
        how = f"{_backend(fc1, 'fprop')} reads the tokens in its product; no row of them is written"
    elif plan.x_token_quantizer is not None:
        how = f"{_gathers_codes(plan.x_token_quantizer, fc1, 'fprop')}; no row of them is written"
    else:
        how = f"{fc1.quantizers['x'].backend} quantizes the tokens; no row of them is written"
    yield "x in fprop", how
    if fc1.need_dw:
        if plan.x_in_wgrad == "tokens":
            how = f"{_backend(fc1, 'wgrad')} reads the tokens in its product"
        elif plan.x_in_wgrad == "kept":
            how = 'kept from forward: form is "keep_all"'
        elif plan.x_in_wgrad == "codes of rows":
            how = f"{fc1_again.quantizers['x'].backend} quantizes the tokens in backward"
        else:
            how = f"rows are permuted again: {_takes_none(fc1_again, 'x', 'wgrad')}"
        yield "x in wgrad", how
    if fc2.need_dx or fc2.need_dw:
        yield "dy", _dy(fc2, call, reads_bias2)
    if plan.hidden is not None:
        yield "fc1's result", f'{plan.hidden.backend} quantizes it for backward: form is "lean"'


def _gathers_codes(once: QuantizePlan, layer: Layer, gemm: Gemm) -> str:
    return f"{once.backend} quantizes each token once, and {_backend(layer, gemm)} reads its codes in {gemm}"


def _why_rows_of_x(call: MoeCall, watched: bool) -> str:
    fc1 = call.moe.forward.fc1
    if watched:
        return _OBSERVER
    if not fc1.quantized_fprop and ("x" in fc1.quantizers or "x" in call.moe.amax_only[0]):
        return "fprop reads them in high precision beside wgrad's codes"
    kept = takes_tokens(fc1, "x") or (fc1.quantize_x is None and gathers(fc1, "x", "fprop"))
    return 'form is "keep_all", which keeps them for wgrad' if kept else _takes_none(fc1, "x", "fprop")


def _dy(fc2: Layer, call: MoeCall, reads_bias2: bool) -> str:
    read: dict[Gemm, bool] = {"dgrad": fc2.need_dx, "wgrad": fc2.need_dw}
    quantized = {"dgrad": fc2.quantized_dgrad, "wgrad": fc2.quantized_wgrad}
    reads_dy: list[Gemm] = [gemm for gemm, needed in read.items() if needed and not quantized[gemm]]
    if call.fc2.probe is not None:
        why = _OBSERVER
    elif reads_bias2:
        why = "the gradient of fc2's bias, or of the choices' weights beside it, sums them"
    elif call.moe.dy_in_dgrad != "rows" and fc2.quantize_dy is None:
        return f"{_backend(fc2, 'dgrad')} reads it by token in its products; no row of it is written"
    elif call.moe.dy_in_dgrad != "rows":
        return "; ".join([*_dy_by_token(fc2, call.moe, reads_dy), "no row of it is written"])
    elif reads_dy and takes_tokens(fc2, "dy"):
        why = f"{_backend(fc2, reads_dy[0])} takes no tokens in {reads_dy[0]}, which reads them in high precision"
    else:
        why = _takes_none(fc2, "dy", "dgrad" if fc2.need_dx else "wgrad")
    return f"rows are permuted first: {why}"


def _dy_by_token(fc2: Layer, plan: MoePlan, unquantized: Sequence[Gemm]) -> Iterator[str]:
    """What reads dy's tokens: the quantizers, and the products that read it unquantized."""
    of_rows = plan.dy_rows.quantizers.get("dy")
    if plan.dy_token_quantizer is not None:
        yield _gathers_codes(plan.dy_token_quantizer, fc2, "dgrad")
    if of_rows is not None:
        yield f"{'for wgrad ' if plan.dy_token_quantizer else ''}{of_rows.backend} quantizes it by token"
    for gemm in unquantized:
        yield f"{_backend(fc2, gemm)} reads the tokens in {gemm}"


def _takes_none(layer: Layer, operand: Operand, gemm: Gemm) -> str:
    """That a quantizer or, without one, a product takes rows alone."""
    if operand in layer.quantizers:
        return f"{layer.quantizers[operand].backend}'s quantizer takes no tokens"
    return f"{_backend(layer, gemm)} takes no tokens in {gemm}"


def _backend(layer: Layer, gemm: Gemm) -> str:
    plan = dict(layer.plan.gemms)[gemm]
    assert plan is not None  # of a product that is computed
    return plan.backend
