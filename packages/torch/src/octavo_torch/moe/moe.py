"""moe_mlp: tokens to experts, their MLP, and back, as one differentiable function that keeps little."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from octavo import Recipe
from octavo_registry.contract.cards import Activation
from octavo_torch.arrays.checks import backend_names
from octavo_torch.arrays.interleaving import check_interleave
from octavo_torch.arrays.per_group import Weights, leaves_of
from octavo_torch.compiler.refused_derivatives import check_no_tangent
from octavo_torch.dispatch.recipes import recipe_of
from octavo_torch.dispatch.room import Room
from octavo_torch.linear import contexts
from octavo_torch.linear.parameters import CastWeight, GivenWeight, parameters_of
from octavo_torch.linear.weights import QuantizedWeight
from octavo_torch.mlp.arguments import check_common, check_operands
from octavo_torch.mlp.plan import MlpPlan, RequiredGradients, mlp_plan_for
from octavo_torch.moe.arguments import check_choices, check_weights
from octavo_torch.moe.autograd import moe_function
from octavo_torch.moe.call import MoeCall, MoeOperands
from octavo_torch.moe.forms import check_form, check_weight_codes, rows_plan
from octavo_torch.moe.forward import arrive
from octavo_torch.moe.parallel.agreement import gradient_bits
from octavo_torch.moe.parallel.exchange_for_call import Sides, beside_graph, check_eager, token_exchange_for
from octavo_torch.moe.parallel.group import ExpertRanks, expert_group
from octavo_torch.moe.parallel.options import Exchange, check_exchange
from octavo_torch.moe.parallel.own_experts import check_wrapper
from octavo_torch.moe.passes import run_forward
from octavo_torch.moe.plan import moe_plan_for
from octavo_torch.moe.rows.moves import move_set_for
from octavo_torch.scaling.delayed_state import DelayedState
from octavo_torch.scaling.seeds import for_backward
from octavo_torch.wgrad.graph_route import graph_route
from octavo_torch.wgrad.postponed import DelayedWgrad

_is_compiling = torch.compiler.is_compiling


class Routed(NamedTuple):
    """moe_mlp's operands in addition to x and the experts' weights."""

    choices: Tensor
    weights: Tensor
    bias1: Weights | None = None
    bias2: Weights | None = None


def apply(
    x: Tensor, w1: Weights | QuantizedWeight, w2: Weights | QuantizedWeight, routed: Routed, call: MoeCall
) -> Tensor:
    """`moe_mlp`, eagerly, where a seed may also be a SeedCounter; stores what it resolves in `call`."""
    check_eager(call)
    if call.ep is not None:
        check_wrapper(call.ep, (leaf for weight in (w1, w2) for leaf in _own_leaves(weight)))
    if contexts.any_active() and contexts.concerns(x):
        operands = {"x": x, "w1": w1, "w2": w2, **routed._asdict()}
        call.unwrap_states()
        return contexts.run(lambda x, w1, w2, **rest: apply(x, w1, w2, Routed(**rest), copy(call)), operands)
    first = parameters_of(w1, routed.bias1, ("w1", "bias1"))
    second = parameters_of(w2, routed.bias2, ("w2", "bias2"))
    name = check_operands(x, first.weight, second.weight, call.activation)
    choices, weights = routed.choices, routed.weights
    check_choices("choices", choices, x)
    check_weights(weights, choices)
    arrays = MoeOperands(x, first.weight, second.weight, weights, first.bias, second.bias)
    enabled = torch.is_grad_enabled()
    needs = [enabled and isinstance(value, Tensor) and value.requires_grad for value in arrays]
    need_da = needs[0] or needs[1] or needs[3] or needs[4]
    needed = RequiredGradients(needs[0], needs[1], needs[2], need_da, call.delayed_wgrad is not None)
    resolve(call, name, arrays, needed)
    w1_leaf, w2_leaf = call.resolve_weights(first, second, needs[1], needs[2])
    if call.ep is not None:
        sides = Sides(x.shape[1], arrays.w2.shape[2], arrays.w2.shape[1], arrays.w1.shape[0])
        gradients = gradient_bits(x=needs[0], weights=needs[3], any_input=any(needs))
        call.token_exchange = token_exchange_for(call, x, sides, choices.shape[1], gradients)
    if any(needs):
        return moe_function(call, choices, x, w1_leaf, w2_leaf, *arrays[3:], call.anchor)
    if forward_ad._current_level >= 0:  # with gradients, autograd's functions refuse them
        check_no_tangent(x, weights, *leaves_of(first.leaves), *leaves_of(second.leaves), *arrays[4:])
    (y, *_), _ = run_forward(call, *arrive(call, choices, arrays))
    return y


def _own_leaves(weight: GivenWeight) -> list[Tensor]:
    """The tensors of a weight, also of one that is quantized or that autocast casts; anything else is refused later."""
    while isinstance(weight, QuantizedWeight | CastWeight):
        weight = weight.weight
    parts = weight if isinstance(weight, list | tuple) else [weight]
    return [part for part in parts if isinstance(part, Tensor)]


def resolve(call: MoeCall, activation: Activation, arrays: MoeOperands, needed: RequiredGradients) -> MlpPlan:
    """Sets the call's plans, its layers, and the functions that move rows.

    Returns the experts' plan before it is narrowed to what the call's form computes in each pass.
    """
    x, w1, w2, _, bias1, bias2 = arrays
    form, weight_codes = check_form(call.form), check_weight_codes(call.weight_codes)
    at_host = x.device.type == "cpu"
    full = mlp_plan_for(call.recipe, activation, x, w1, w2, at_host, needed, call.backend)
    check_common(call, full, x, bias1, bias2)
    if full.fc1.needs_seed or full.fc2.needs_seed:
        call.seed = for_backward(call.seed)
    if call.room is not None:
        full = full.leaving(call.room.gemms)
    block = check_interleave(call.interleave, activation, w1)
    full = full.interleaved(block)
    keeps_codes = form == "lean" and (needed.w2 or needed.da)
    hidden = rows_plan(x, int(w1.shape[1]), int(w1.shape[0]), call.backend) if keeps_codes else None
    call.moe = moe_plan_for(full, form, weight_codes, hidden)
    if call.ep is not None:
        # random bits depend on an expert's number among the experts of all ranks
        call.group_offset += call.ep.rank * int(w1.shape[0])
    call.moves = move_set_for(x, full.fc2.row_dtype, int(w1.shape[0]), call.backend)
    call.set_layers(call.moe.forward, block)
    return full


_NAMES = frozenset(Routed._fields)


def _apply_options(x: Tensor, w1: Weights | QuantizedWeight, w2: Weights | QuantizedWeight, **options: Any) -> Tensor:
    routed = Routed(**{name: value for name, value in options.items() if name in _NAMES})
    call = MoeCall(**{name: value for name, value in options.items() if name not in _NAMES})
    return apply(x, w1, w2, routed, call)


_in_graph = graph_route(_apply_options)
_over_ranks = beside_graph(apply)


def run(
    x: Tensor, w1: Weights | QuantizedWeight, w2: Weights | QuantizedWeight, routed: Routed, call: MoeCall
) -> Tensor:
    """`apply`; under torch.compile as a part of the one graph, or over ranks beside it."""
    if not _is_compiling():
        return apply(x, w1, w2, routed, call)
    if call.ep is not None:
        return _over_ranks(x, w1, w2, routed, call)
    return _in_graph(x, w1, w2, **routed._asdict(), **call.present())


def moe_mlp(
    x: Tensor,
    choices: Tensor,
    weights: Tensor,
    w1: Weights | QuantizedWeight,
    w2: Weights | QuantizedWeight,
    *,
    recipe: Recipe | str | None,
    activation: Activation = "swiglu",
    bias1: Weights | None = None,
    bias2: Weights | None = None,
    form: Literal["keep_all", "standard", "lean", "recompute"] = "standard",
    weight_codes: Literal["keep", "remake"] = "keep",
    seed: int | Tensor | None = None,
    state: tuple[DelayedState, DelayedState] | None = None,
    group_offset: int = 0,
    backend: str | Sequence[str] | None = None,
    interleave: int | None = None,
    main_grad: Literal["accumulate", "overwrite"] | None = None,
    delayed_wgrad: DelayedWgrad | None = None,
    ep: ExpertRanks | None = None,
    exchange: Exchange | None = None,
    room: Room | None = None,
) -> Tensor:
    """y[t] = sum over j of w2[g] (p act(w1[g] x[t] + bias1[g])) + p bias2[g]; g is choices[t, j] and p weights[t, j].

    x             [T, K]            tokens in any order; bf16, fp16 or fp32
    choices       [T, k]            integers on x's device, the expert of each choice; a number outside 0 to G - 1, such
                                    as -1, routes that choice nowhere
    weights       [T, k]            fp32, bf16 or fp16: what each choice counts
    w1, w2        [G, 2 F, K], [G, N, F]  as grouped_mlp's, and so are bias1 and bias2
    recipe                          a Recipe or its name; None: HighPrecision
    form                            what is kept for the backward. "standard": x, and fc1's result of each choice.
                                    "keep_all": operands of the weights' gradients, too, so that backward makes none
                                    again. "recompute": x alone, and with weight_codes="keep" also w1's codes for
                                    fprop. "lean": fc1's result as E4M3 codes with a scale for every 128 of a row;
                                    backward's bits are then not those of the others, see octavo_numerics.keep_rows
    weight_codes                    of weights that this call quantizes, the codes that backward reads: "keep" them, or
                                    "remake" them in backward. Codes that are given (`quantize_weight`) are shared
    seed, state, group_offset, backend, interleave, main_grad, delayed_wgrad
                                    as grouped_mlp's
    ep                              the ranks that share the experts: a process group, or one axis of a DeviceMesh. w1,
                                    w2 and biases are then this rank's G experts, and choices are among all: expert e
                                    is number e % G of rank e // G. Every rank calls it, one without tokens, too, and
                                    runs its backward
    exchange                        with `ep`, how tokens reach the experts and come back; None: octavo_torch.Exchange()
    room                            multiprocessors that the call leaves to what runs beside it; None: it takes all
    Returns       [T, N]            zeros for a token that is routed nowhere

    The bits, of y and of every gradient, are those of `permute`, `grouped_mlp` with the weights as probs (and as
    bias2_scales) and `unpermute`, in every form but "lean", whose y is the same. `bytes_kept` says how much each form
    keeps. Differentiable once in x, weights, w1, w2 and biases; only what is asked for is computed. Nothing is read
    back from the device except, with `ep`, the sizes, unless the exchange has static buffers. With `ep`, results and
    gradients are those of one process with the tokens of all ranks in their order, unless the exchange says otherwise.
    Raises as grouped_mlp and permute do, and ExchangeError where ranks do not agree, or do not answer.
    """
    group = expert_group(ep)
    if exchange is not None and group is None:
        raise ValueError("exchange says how tokens reach other ranks, and ep is None; give both")
    call = MoeCall(
        recipe=recipe_of(recipe),
        backend=backend_names(backend),
        group_offset=group_offset,
        seed=seed,
        main_grad=main_grad,
        activation=activation,
        interleave=interleave,
        states=state,
        delayed_wgrad=delayed_wgrad,
        form=form,
        weight_codes=weight_codes,
        ep=group,
        exchange=None if group is None else check_exchange(exchange),
        room=room,
    )
    return run(x, w1, w2, Routed(choices, weights, bias1, bias2), call)
