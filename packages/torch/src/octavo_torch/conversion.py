"""convert: give a model's experts and its Linear layers another recipe, in place, selected by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn

from octavo import Recipe
from octavo_torch.adapters.grouped_mm import GroupedMM
from octavo_torch.adapters.transformers import ExpertsFunction, ExpertsModule, check_values, is_dispatched, run_by
from octavo_torch.arrays.checks import brief
from octavo_torch.arrays.group_parameters import reshard
from octavo_torch.arrays.selection import Filter, check_filter, listed, name_in, selects
from octavo_torch.dispatch.recipes import recipe_of
from octavo_torch.distributed.fsdp.api import check_gathered
from octavo_torch.linear.coded_weight import CodedWeight
from octavo_torch.linear.module_base import LinearModule
from octavo_torch.mlp.experts import Experts
from octavo_torch.mlp.packed_weight import PackedWeight
from octavo_torch.scaling.changed_recipe import set_recipe
from octavo_torch.scaling.recipe_module import RecipeModule


def convert(
    model: nn.Module,
    recipe: Recipe | str | None,
    filter: Filter = None,
    *,
    seed: int | None = None,
    backend: str | Sequence[str] | None = None,
) -> tuple[str, ...]:
    """Give experts and Linear layers in `model` another recipe, in place; returns the names of those that have it now.

    recipe    a Recipe or its name; None: high precision
    filter    selects modules: a pattern of whole names such as "model.layers.*.experts", or a function of name and
              module; None: all experts, and all modules that are an octavo_torch.Linear
    seed      base of stochastic rounding's seeds; None: drawn from torch's generator
    backend   a name or a closed list of names; None: modules of octavo_torch keep theirs

    Experts are GroupedLinear, GroupedMLP and MoE; modules of transformers that dispatch an experts function; modules
    with torchtitan's method `_grouped_mm(A=, B_t=, offs=)`. Parameters, their names, classes and hooks stay. Linear,
    GroupedLinear, GroupedMLP and MoE start with a fresh recipe state, in buffers; other libraries' modules have no
    place for a state, so recipes with one are refused for them. torch.nn.Linear is left alone: `convert_linears` puts a
    Linear in its place.

    Raises ValueError, before anything has changed, for arguments that do not fit, for a model without experts, for
    weights that are codes of another recipe, and for weights that FSDP2 has gathered as codes or values and would have
    to gather otherwise: convert a model before its first forward, if `quantize_before_gather` is on.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is {brief(model)}; give a torch.nn.Module")
    reshard(model)
    check_filter(filter)
    chosen = recipe_of(recipe)
    experts = dict(_experts(model))
    names = [name for name, module in experts.items() if selects(filter, name, module)]
    if not experts:
        raise ValueError(
            "model has no experts; give one with GroupedLinear, GroupedMLP, MoE or modules of a known library, or put "
            "octavo_torch.Linear in the place of torch's by convert_linears" + _one_by_one(model)
        )
    if not names:
        raise ValueError(f"filter matches none of the model's experts; give names among {listed(experts)}")
    for name in names:
        _check_codes(name, experts[name], chosen)
        check_gathered(name, experts[name], chosen)
        if is_dispatched(experts[name]):
            check_values(name, cast("ExpertsModule", experts[name]))
    others = [name for name in names if not isinstance(experts[name], RecipeModule)]
    product = GroupedMM(chosen, seed, backend) if others else None
    for name in names:
        module = experts[name]
        if isinstance(module, LinearModule | Experts):
            set_recipe(module, chosen, seed, backend, (2,) if isinstance(module, Experts) else ())
        elif product is not None:
            _set_product(module, product)
    return tuple(names)


def _experts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        has_grouped_mm = callable(getattr(module, "_grouped_mm", None))
        if isinstance(module, LinearModule | Experts) or has_grouped_mm or is_dispatched(module):
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
    """ValueError for weights that are codes, or that each call expands to codes, of another recipe."""
    for parameter, weight in module.named_parameters(recurse=False):
        if not isinstance(weight, CodedWeight | PackedWeight) or weight.recipe.fingerprint == recipe.fingerprint:
            continue
        if isinstance(weight, CodedWeight):
            raise ValueError(
                f"recipe is {recipe.kind} ({recipe.fingerprint}) and {name_in(name, parameter)} is codes of "
                f"{weight.recipe.kind} ({weight.recipe.fingerprint}) alone; give its module a weight of values first, "
                "such as octavo_torch.dequantize of its codes"
            )
        if weight.recipe.quantizes("fprop"):
            raise ValueError(
                f"recipe is {recipe.kind} ({recipe.fingerprint}) and {name_in(name, parameter)} is MXFP4 alone, which "
                f"each call expands to codes of {weight.recipe.kind} ({weight.recipe.fingerprint}); load its file into "
                "a module with the other recipe, or give its module a weight of values first, such as its dequantize()"
            )


def _set_product(module: nn.Module, product: GroupedMM) -> None:
    """Let another library's experts multiply with `product`."""
    if callable(getattr(module, "_grouped_mm", None)):
        module._grouped_mm = _TorchtitanGroupedMM(product)  # type: ignore[assignment]
    else:
        run_by(module, ExpertsFunction(product))
