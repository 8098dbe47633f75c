"""quantized_parameters: modules that are created inside of it hold their weights as codes alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from octavo import Recipe
from octavo_torch.dispatch.recipes import recipe_of

_RECIPE: ContextVar[Recipe | None] = ContextVar("octavo_torch.quantized_parameters", default=None)


@contextmanager
def quantized_parameters(recipe: Recipe | str) -> Iterator[None]:
    """Modules created inside have `recipe`, and CodedWeights as weights: no high-precision copy of them remains.

    recipe   a Recipe or its name, of which fprop and dgrad read codes, and whose codes depend on the values alone

    It applies to GroupedLinear, GroupedMLP and MoE, with this recipe or without one of their own; a module that is
    given another recipe keeps values, and so does a Linear, whose weight is that of torch.nn.Linear. The codes are
    those of the module's initial values, in the layouts that the backend reads on the module's device.
    `weight.copy_(values)` and load_state_dict quantize new values in place; `MasterWeights` has an optimizer train
    them. Raises ValueError for a recipe that does not fit.
    """
    chosen = recipe_of(recipe)
    if chosen.stateful:
        raise ValueError(
            f"recipe is {chosen.kind}, whose codes depend on earlier steps; give one without state, such as 'fp8-block'"
        )
    values = [gemm for gemm in ("fprop", "dgrad") if not chosen.quantizes(gemm)]
    if values:
        raise ValueError(
            f"recipe is {chosen.kind} with {values[0]}='high_precision', which reads the weights' values; make fprop "
            "and dgrad quantized"
        )
    token = _RECIPE.set(chosen)
    try:
        yield
    finally:
        _RECIPE.reset(token)


def recipe_of_parameters() -> Recipe | None:
    """The recipe of the innermost `quantized_parameters` that is entered; None outside."""
    return _RECIPE.get()
