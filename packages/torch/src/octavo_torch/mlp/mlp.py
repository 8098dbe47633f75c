"""grouped_mlp: fc1, activation and fc2 as one differentiable function, with the quantizers between them fused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from octavo import HighPrecision, Recipe
from octavo_torch.arrays.checks import backend_names
from octavo_torch.arrays.interleaving import check_interleave
from octavo_torch.arrays.per_group import Weights, as_one
from octavo_torch.arrays.sizes import as_sizes
from octavo_torch.compiler.graphs import wants_graph
from octavo_torch.compiler.tracing import is_plain
from octavo_torch.linear import contexts
from octavo_torch.linear.coded_weight import operands_of
from octavo_torch.linear.grouped import Rows
from octavo_torch.linear.quantized_input import QUANTIZED, check_codes, rows_of
from octavo_torch.linear.weights import Layouts, QuantizedWeight
from octavo_torch.mlp.arguments import check_mlp, check_mlp_buffers, check_operands
from octavo_torch.mlp.autograd import grouped_mlp_function
from octavo_torch.mlp.forward import MlpCall, States, forward
from octavo_torch.mlp.plan import MlpPlan, Wanted, mlp_plan_for
from octavo_torch.scaling.delayed_state import DelayedState
from octavo_torch.scaling.seeds import Seed
from octavo_torch.wgrad.main_grad import MainGrad
from octavo_torch.wgrad.postponed import DelayedWgrad
from octavo_torch.wgrad.target import OUTSIDE_GRAPH, target_for

_HIGH_PRECISION = HighPrecision()
_is_compiling = torch.compiler.is_compiling


def apply(
    x: Rows,
    w1: Weights | QuantizedWeight,
    w2: Weights | QuantizedWeight,
    group_sizes: Any,
    recipe: Recipe,
    *,
    activation: str = "swiglu",
    probs: Tensor | None = None,
    bias1: Weights | None = None,
    bias2: Weights | None = None,
    bias2_scales: Tensor | None = None,
    seed: Seed = None,
    second_seed: Seed = None,
    state: States | None = None,
    record: bool = True,
    group_offset: int = 0,
    backend: str | tuple[str, ...] | None = None,
    interleave: int | None = None,
    out: Tensor | None = None,
    grad_input: Tensor | None = None,
    main_grad: MainGrad | None = None,
    delayed_wgrad: DelayedWgrad | tuple[DelayedWgrad | None, DelayedWgrad | None] | None = None,
) -> Tensor:
    """`grouped_mlp`, where a seed may also be a SeedCounter; `record` False leaves the states' amax alone.

    second_seed     of fc2; None: seed XOR 2^63
    delayed_wgrad   of both weights, or of each
    """
    if (contexts.autocast_anywhere() or contexts.transforms_active()) and contexts.matters(x):
        return contexts.run(apply, dict(locals()))
    w1, bias1 = operands_of(w1, bias1)
    w2, bias2 = operands_of(w2, bias2)
    own1, own2 = (weight.weight if type(weight) is QuantizedWeight else weight for weight in (w1, w2))
    first, second = as_one("w1", own1), as_one("w2", own2)
    bias1, bias2 = as_one("bias1", bias1), as_one("bias2", bias2)
    given, x_codes = x, None
    if type(x) in QUANTIZED:
        x, x_codes, group_sizes = rows_of(x, first, group_sizes, recipe)  # type: ignore[arg-type]
    name = check_operands(x, first, second, activation)
    assert isinstance(x, Tensor)
    arrays = (x, first, second, probs, bias1, bias2, bias2_scales)
    enabled = torch.is_grad_enabled()
    needs = [enabled and isinstance(value, Tensor) and value.requires_grad for value in arrays]
    wanted = Wanted(needs[0], needs[1], needs[2], needs[0] or needs[1] or needs[3] or needs[4])
    sizes, at_host = as_sizes(group_sizes, x.shape[0], first.shape[0], x)
    plan = mlp_plan_for(recipe, name, x, first, second, at_host, wanted, backend, wants_graph(x))
    check_mlp(plan, x, probs, bias1, bias2, bias2_scales, seed, state)
    check_mlp_buffers(plan, arrays, out, grad_input)
    if x_codes is not None:
        check_codes(plan.fc1, recipe, given, x_codes)  # type: ignore[arg-type]
    block = check_interleave(interleave, name, first)
    codes = tuple(_codes(weight, recipe, layer.w_layouts) for weight, layer in ((w1, plan.fc1), (w2, plan.fc2)))
    if type(w1) is QuantizedWeight and w1.interleave != block:
        raise ValueError(
            f"w1 was quantized for interleave={w1.interleave or None} and the call's is {interleave}; give one value"
        )
    stores: Any = delayed_wgrad
    if not isinstance(stores, tuple) or len(stores) != 2:
        stores = stores, stores
    targets = (
        target_for(own1, needs[1], main_grad, stores[0]),  # type: ignore[arg-type]
        target_for(own2, needs[2], main_grad, stores[1]),  # type: ignore[arg-type]
    )
    if plan.prepare is not None:
        sizes = plan.prepare(sizes, x.shape[0], x)
    if out is not None:
        # so that the caller's tensor stays a plain buffer, for the next call
        out = out.detach()
    seeds = (seed, second_seed)
    call = MlpCall(plan, sizes, seeds, state, record, group_offset, codes, x_codes, targets, block, out, grad_input)
    if any(needs):
        stored = [target is not None and target.store is not None for target in targets]
        weights = (weight.detach() if later else weight for weight, later in zip(arrays[1:3], stored, strict=True))
        anchors = (target.store.anchor for target in targets if target is not None and target.store is not None)
        return grouped_mlp_function(call, out, x, *weights, *arrays[3:], next(anchors, None))
    y = forward(call, *arrays).y
    if out is not None and is_plain(out):
        torch.autograd.graph.increment_version(out)
    return y


def _codes(weight: Weights | QuantizedWeight, recipe: Recipe, layouts: Layouts | None) -> Any:
    if not isinstance(weight, QuantizedWeight):
        return None
    weight.check(recipe, layouts)
    return weight.codes


# dynamo sees one call; what happens inside is traced below it, where registry, caches and autograd are plain Python
_apply_in_graph = torch._dynamo.nonstrict_trace(apply)

_apply_beside_graph: Callable[..., Tensor] = torch.compiler.disable(  # type: ignore[no-untyped-call]
    apply, reason=OUTSIDE_GRAPH
)


@torch._dynamo.nonstrict_trace
def _apply_with_own_sizes(x: Rows, w1: Any, w2: Any, recipe: Recipe, **given: Any) -> Tensor:
    """For rows that are quantized and have their sizes."""
    return apply(x, w1, w2, None, recipe, **given)


def run(x: Rows, w1: Any, w2: Any, group_sizes: Any, recipe: Recipe, **given: Any) -> Tensor:
    """`apply`; under torch.compile as a part of the one graph, where a call out of traced code takes no None."""
    if not _is_compiling():
        return apply(x, w1, w2, group_sizes, recipe, **given)
    given = {name: value for name, value in given.items() if value is not None}
    if "main_grad" in given or "delayed_wgrad" in given:
        return _apply_beside_graph(x, w1, w2, group_sizes, recipe, **given)
    if group_sizes is None:
        return _apply_with_own_sizes(x, w1, w2, recipe, **given)
    return _apply_in_graph(x, w1, w2, group_sizes, recipe, **given)


def grouped_mlp(
    x: Rows,
    w1: Weights | QuantizedWeight,
    w2: Weights | QuantizedWeight,
    group_sizes: Any,
    *,
    activation: str = "swiglu",
    probs: Tensor | None = None,
    bias1: Weights | None = None,
    bias2: Weights | None = None,
    bias2_scales: Tensor | None = None,
    recipe: Recipe | None,
    seed: int | Tensor | None = None,
    state: tuple[DelayedState, DelayedState] | None = None,
    group_offset: int = 0,
    backend: str | Sequence[str] | None = None,
    interleave: int | None = None,
    out: Tensor | None = None,
    grad_input: Tensor | None = None,
    main_grad: Literal["accumulate", "overwrite"] | None = None,
    delayed_wgrad: DelayedWgrad | None = None,
) -> Tensor:
    """y[r] = w2[g] (probs[r] act(w1[g] x[r] + bias1[g])) + bias2[g] for every row r of group g.

    x             [M, K]            bf16, fp16 or fp32; rows of one group stand together, in group order. Or quantized
                                    rows, as grouped_linear takes them
    w1            [G, 2 F, K]       gate half first, for swiglu, geglu (with erf) and geglu_tanh; [G, F, K] for silu,
                                    gelu (with erf), gelu_tanh and relu2. x's dtype; or one tensor a group; or what
                                    `quantize_weight` made of either
    w2            [G, N, F]         likewise
    group_sizes   [G]               as grouped_linear's
    probs         [M]               fp32, multiplies the activation of each row
    bias1, bias2  [G, 2 F], [G, N]  optional; bias2_scales [M] multiplies bias2 row by row (often `probs` once more)
    recipe                          None: HighPrecision
    seed                            of stochastic rounding; fc1 rounds with it and fc2 with seed XOR 2^63
    state                           of delayed scaling: (fc1's, fc2's)
    interleave                      b: in w1 and bias1 b rows of the gate and b of the up projection take turns (1:
                                    every other row; b divides F). They are quantized, and multiply, as if the gate half
                                    came first, from a copy that is made in each call unless w1 is quantized already
    group_offset, backend, out, grad_input, main_grad, delayed_wgrad
                                    as grouped_linear's; the last two are for both weights
    Returns       [M, N]            rows past the sum are zero, and neither x nor probs are read there

    fc1's result has x's dtype. The activation and its gradient are computed in fp32, rounded once to that dtype and
    then quantized: in one pass where a backend fuses that, else one after the other; from the rounded array on the bits
    are equal. Differentiable once in x, weights, probs, biases and bias2_scales; only what is asked for is computed.
    Raises as grouped_linear does. `explain_mlp` tells what is fused.
    """
    names = backend_names(backend)
    return run(
        x,
        w1,
        w2,
        group_sizes,
        _HIGH_PRECISION if recipe is None else recipe,
        activation=activation,
        probs=probs,
        bias1=bias1,
        bias2=bias2,
        bias2_scales=bias2_scales,
        seed=seed,
        state=state,
        group_offset=group_offset,
        backend=names,
        interleave=interleave,
        out=out,
        grad_input=grad_input,
        delayed_wgrad=delayed_wgrad,
        main_grad=main_grad,
    )


def explain_mlp(
    x: Tensor,
    w1: Weights,
    w2: Weights,
    group_sizes: Any,
    *,
    activation: str = "swiglu",
    recipe: Recipe | None,
    backend: str | Sequence[str] | None = None,
) -> MlpPlan:
    """What `grouped_mlp` runs for these operands and their gradients, printable: backends, layouts, what is fused.

    Nothing is computed; tensors on the meta device are not served. Raises as `grouped_mlp` does.
    """
    first, second = as_one("w1", w1), as_one("w2", w2)
    name = check_operands(x, first, second, activation)
    _, at_host = as_sizes(group_sizes, x.shape[0], first.shape[0], x)
    needs = x.requires_grad, first.requires_grad, second.requires_grad
    wanted = Wanted(*needs, needs[0] or needs[1])
    names = backend_names(backend)
    chosen = _HIGH_PRECISION if recipe is None else recipe
    return mlp_plan_for(chosen, name, x, first, second, at_host, wanted, names, wants_graph(x))
