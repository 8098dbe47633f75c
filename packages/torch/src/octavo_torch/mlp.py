"""grouped_mlp: fc1, activation and fc2 as one differentiable function, with the quantizers between them fused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from octavo import HighPrecision, Recipe
from octavo_torch.delayed import DelayedState
from octavo_torch.graphs import wants_graph
from octavo_torch.main_grad import MainGrad, check_main_grad, check_mode
from octavo_torch.mlp_arguments import check_mlp, check_operands
from octavo_torch.mlp_autograd import grouped_mlp_function
from octavo_torch.mlp_forward import MlpCall, States, forward
from octavo_torch.mlp_plan import MlpPlan, Wanted, mlp_plan_for
from octavo_torch.seeds import Seed
from octavo_torch.sizes import as_sizes
from octavo_torch.weights import QuantizedWeight

_HIGH_PRECISION = HighPrecision()
_is_compiling = torch.compiler.is_compiling


def apply(
    x: Tensor,
    w1: Tensor | QuantizedWeight,
    w2: Tensor | QuantizedWeight,
    group_sizes: Any,
    recipe: Recipe,
    *,
    activation: str = "swiglu",
    probs: Tensor | None = None,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    bias2_scales: Tensor | None = None,
    seed: Seed = None,
    second_seed: Seed = None,
    state: States | None = None,
    record: bool = True,
    group_offset: int = 0,
    backend: str | tuple[str, ...] | None = None,
    main_grad: MainGrad | None = None,
) -> Tensor:
    """`grouped_mlp`, where a seed may also be a SeedCounter; `record` False leaves the states' amax alone.

    second_seed   of fc2; None: seed XOR 2^63
    """
    first: Tensor = w1.weight if type(w1) is QuantizedWeight else w1  # type: ignore[assignment]
    second: Tensor = w2.weight if type(w2) is QuantizedWeight else w2  # type: ignore[assignment]
    name = check_operands(x, first, second, activation)
    arrays = (x, first, second, probs, bias1, bias2, bias2_scales)
    enabled = torch.is_grad_enabled()
    needs = [enabled and isinstance(value, Tensor) and value.requires_grad for value in arrays]
    wanted = Wanted(needs[0], needs[1], needs[2], needs[0] or needs[1] or needs[3] or needs[4])
    sizes, at_host = as_sizes(group_sizes, x.shape[0], first.shape[0], x)
    plan = mlp_plan_for(recipe, name, x, first, second, at_host, wanted, backend, wants_graph(x))
    check_mlp(plan, x, probs, bias1, bias2, bias2_scales, seed, state)
    codes = tuple(_codes(weight, recipe, layer.w_layouts) for weight, layer in ((w1, plan.fc1), (w2, plan.fc2)))
    if main_grad is not None:
        check_mode(main_grad)
        for weight, needed in ((first, needs[1]), (second, needs[2])):
            if needed:
                check_main_grad(weight)
    if plan.prepare is not None:
        sizes = plan.prepare(sizes, x.shape[0], x)
    leaves = (first, second) if main_grad is not None else (None, None)
    call = MlpCall(plan, sizes, (seed, second_seed), state, record, group_offset, codes, main_grad, leaves)
    if any(needs):
        return grouped_mlp_function(call, *arrays)
    return forward(call, *arrays).y


def _codes(weight: Tensor | QuantizedWeight, recipe: Recipe, layouts: tuple[str, str] | None) -> Any:
    if not isinstance(weight, QuantizedWeight):
        return None
    weight.check(recipe, layouts)
    return weight.codes


# dynamo sees one call; what happens inside is traced below it, where registry, caches and autograd are plain Python
_apply_in_graph = torch._dynamo.nonstrict_trace(apply)

_apply_beside_graph: Callable[..., Tensor] = torch.compiler.disable(  # type: ignore[no-untyped-call]
    apply,
    reason="main_grad was given, and a traced backward cannot write into a parameter's attribute; leave it out under "
    "torch.compile(fullgraph=True), or compile with fullgraph=False, which runs this call beside the graph",
)


def run(*operands: Any, **given: Any) -> Tensor:
    """`apply`; under torch.compile as a part of the one graph, where a call out of traced code takes no None."""
    if not _is_compiling():
        return apply(*operands, **given)
    if given.get("main_grad") is not None:
        return _apply_beside_graph(*operands, **given)
    return _apply_in_graph(*operands, **{name: value for name, value in given.items() if value is not None})


def grouped_mlp(
    x: Tensor,
    w1: Tensor | QuantizedWeight,
    w2: Tensor | QuantizedWeight,
    group_sizes: Any,
    *,
    activation: str = "swiglu",
    probs: Tensor | None = None,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    bias2_scales: Tensor | None = None,
    recipe: Recipe | None,
    seed: int | Tensor | None = None,
    state: tuple[DelayedState, DelayedState] | None = None,
    group_offset: int = 0,
    backend: str | Sequence[str] | None = None,
    main_grad: Literal["accumulate", "overwrite"] | None = None,
) -> Tensor:
    """y[r] = w2[g] (probs[r] act(w1[g] x[r] + bias1[g])) + bias2[g] for every row r of group g.

    x             [M, K]            bf16, fp16 or fp32; rows of one group stand together, in group order
    w1            [G, 2 F, K]       gate half first, for swiglu, geglu (with erf) and geglu_tanh; [G, F, K] for silu,
                                    gelu (with erf), gelu_tanh and relu2. x's dtype; or what `quantize_weight` made
    w2            [G, N, F]         likewise
    group_sizes   [G]               as grouped_linear's
    probs         [M]               fp32, multiplies the activation of each row
    bias1, bias2  [G, 2 F], [G, N]  optional; bias2_scales [M] multiplies bias2 row by row (often `probs` once more)
    recipe                          None: HighPrecision
    seed                            of stochastic rounding; fc1 rounds with it and fc2 with seed XOR 2^63
    state                           of delayed scaling: (fc1's, fc2's)
    group_offset, backend, main_grad   as grouped_linear's; main_grad is both weights'
    Returns       [M, N]            rows past the sum are zero, and neither x nor probs are read there

    fc1's result has x's dtype. The activation and its gradient are computed in fp32, rounded once to that dtype and
    then quantized: in one pass where a backend fuses that, else one after the other; from the rounded array on the bits
    are equal. Differentiable once in x, weights, probs, biases and bias2_scales; only what is asked for is computed.
    Raises as grouped_linear does. `explain_mlp` tells what is fused.
    """
    names = backend if backend is None or isinstance(backend, str) else tuple(backend)
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
        main_grad=main_grad,
    )


def explain_mlp(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    group_sizes: Any,
    *,
    activation: str = "swiglu",
    recipe: Recipe | None,
    backend: str | Sequence[str] | None = None,
) -> MlpPlan:
    """What `grouped_mlp` runs for these operands and their gradients, printable: backends, layouts, what is fused.

    Nothing is computed; tensors on the meta device are not served. Raises as `grouped_mlp` does.
    """
    name = check_operands(x, w1, w2, activation)
    _, at_host = as_sizes(group_sizes, x.shape[0], w1.shape[0], x)
    wanted = Wanted(x.requires_grad, w1.requires_grad, w2.requires_grad, x.requires_grad or w1.requires_grad)
    names = backend if backend is None or isinstance(backend, str) else tuple(backend)
    chosen = _HIGH_PRECISION if recipe is None else recipe
    return mlp_plan_for(chosen, name, x, w1, w2, at_host, wanted, names, wants_graph(x))
