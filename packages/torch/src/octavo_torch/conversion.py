"""convert: give a model's experts another recipe, in place, selected by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from octavo import Recipe
from octavo_torch.adapters.grouped_mm import GroupedMM
from octavo_torch.adapters.transformers import ExpertsFunction, ExpertsModule, is_dispatched
from octavo_torch.arrays.checks import brief
from octavo_torch.dispatch.recipes import recipe_of
from octavo_torch.linear.coded_weight import CodedWeight
from octavo_torch.linear.module import GroupedLinear
from octavo_torch.mlp.experts import Experts
from octavo_torch.scaling.recipe_module import ModuleOptions, RecipeModule
from octavo_torch.scaling.saved_state import STATE_BUFFERS

Filter = str | Callable[[str, nn.Module], bool] | None


def convert(
    model: nn.Module,
    recipe: Recipe | str | None,
    filter: Filter = None,
    *,
    seed: int | None = None,
    backend: str | Sequence[str] | None = None,
) -> tuple[str, ...]:
    """Give the experts in `model` another recipe, in place; returns the names of the modules that have it now.

    recipe    a Recipe or its name; None: high precision
    filter    selects modules: a pattern of whole names such as "model.layers.*.experts", or a function of name and
              module; None: all experts
    seed      base of stochastic rounding's seeds; None: drawn from torch's generator
    backend   a name or a closed list of names

    Experts are GroupedLinear, GroupedMLP and MoE; modules of transformers that dispatch an experts function; modules
    with torchtitan's method `_grouped_mm(A=, B_t=, offs=)`. Parameters, their names, classes and hooks stay.
    GroupedLinear, GroupedMLP and MoE start with a fresh recipe state, in buffers; other libraries' modules have no
    place for a state, so recipes with one are refused for them.

    Raises ValueError, before anything has changed, for arguments that do not fit and for a model without experts.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is {brief(model)}; give a torch.nn.Module")
    if filter is not None and not isinstance(filter, str) and not callable(filter):
        raise ValueError(f"filter is {brief(filter)}; give a pattern of names, a function of name and module, or None")
    chosen = recipe_of(recipe)
    experts = dict(_experts(model))
    names = [name for name, module in experts.items() if _matches(filter, name, module)]
    if not experts:
        raise ValueError(
            "model has no experts; give one with GroupedLinear, GroupedMLP, MoE or modules of a known library"
            + _one_by_one(model)
        )
    if not names:
        all_names = ", ".join(name or "'' (the model itself)" for name in experts)
        raise ValueError(f"filter matches none of the model's experts; give names among {all_names}")
    for name in names:
        _check_codes(name, experts[name], chosen)
    others = [name for name in names if not isinstance(experts[name], RecipeModule)]
    product = GroupedMM(chosen, seed, backend) if others else None
    for name in names:
        module = experts[name]
        if isinstance(module, GroupedLinear | Experts):
            _set_recipe(module, chosen, seed, backend)
        elif product is not None:
            _set_product(module, product)
    return tuple(names)


def _matches(filter: Filter, name: str, module: nn.Module) -> bool:
    if filter is None:
        return True
    return fnmatchcase(name, filter) if isinstance(filter, str) else bool(filter(name, module))


def _experts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        has_grouped_mm = callable(getattr(module, "_grouped_mm", None))
        if isinstance(module, GroupedLinear | Experts) or has_grouped_mm or is_dispatched(module):
            yield name, module


def _one_by_one(model: nn.Module) -> str:
    """What to do with experts that are modules of their own in a list, one for each; "" for a model without such."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and name.split(".")[-1] == "experts" and len(module) > 1:
            return (
                f". {name} is a list of {len(module)} modules: put a GroupedMLP in its place, and load its weights "
                "with octavo_torch.stack_experts(state_dict)"
            )
    return ""


@dataclass
class _TorchtitanGroupedMM:
    """What replaces the method `_grouped_mm` of one of torchtitan's modules."""

    product: GroupedMM

    def __call__(self, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
        return self.product(A, B_t, offs)


def _check_codes(name: str, module: nn.Module, recipe: Recipe) -> None:
    for parameter, weight in module.named_parameters(recurse=False):
        if isinstance(weight, CodedWeight) and weight.recipe.fingerprint != recipe.fingerprint:
            place = f"{name}.{parameter}" if name else parameter
            raise ValueError(
                f"recipe is {recipe.kind} ({recipe.fingerprint}) and {place} is codes of {weight.recipe.kind} "
                f"({weight.recipe.fingerprint}) alone; give its module a weight of values first, such as "
                "octavo_torch.dequantize of its codes"
            )


def _set_product(module: nn.Module, product: GroupedMM) -> None:
    """Let another library's experts multiply with `product`."""
    if callable(getattr(module, "_grouped_mm", None)):
        module._grouped_mm = _TorchtitanGroupedMM(product)  # type: ignore[assignment]
    else:
        module.forward = partial(ExpertsFunction(product), cast("ExpertsModule", module))


def _set_recipe(
    module: GroupedLinear | Experts, recipe: Recipe, seed: int | None, backend: str | Sequence[str] | None
) -> None:
    """Replace the module's recipe; its buffers are as before the first step."""
    layers = (2,) if isinstance(module, Experts) else ()
    device: torch.device = next(module.parameters()).device
    options = ModuleOptions(recipe, backend, seed, module.main_grad, module.per_group_parameters, delay_wgrad=False)
    fresh = RecipeModule({"num_groups": module.num_groups}, options, device, layers)
    for name in STATE_BUFFERS:
        if name in module._buffers:
            delattr(module, name)
        if name in fresh._buffers:
            module.register_buffer(name, fresh._buffers[name])
    # not by assignment, which a module refuses: it would leave the buffers of the recipe before
    for name in ("recipe", "backend", "_stochastic", "_stateful", "_seed", "_unused_amax"):
        module.__dict__[name] = getattr(fresh, name)
    module.reset_buffers()
