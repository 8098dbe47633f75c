"""freeze_experts: experts of a transformers model as codes alone, to train adapters and the rest of the model around.

    from octavo_torch.adapters.frozen import freeze_experts

    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
    freeze_experts(model, "fp8-block")

Written for transformers 5.23 (5.17 and later), whose experts modules keep their names and classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, cast

import torch
from torch import Tensor, nn

from octavo import Recipe
from octavo.errors import one_of
from octavo_torch.adapters.grouped_mm import GroupedMM
from octavo_torch.adapters.names_in_files import names_in_files
from octavo_torch.adapters.transformers import (
    ExpertsFunction,
    ExpertsModule,
    activation_of,
    block_of,
    check_values,
    experts,
    is_dispatched,
    names_of,
    projections,
    run_by,
)
from octavo_torch.arrays.checks import check_module, check_path
from octavo_torch.checkpoint.load import load_experts
from octavo_torch.linear.coded_weight import CodedWeight
from octavo_torch.linear.quantize_weight import quantize_own_values
from octavo_torch.mlp.module import GroupedMLP
from octavo_torch.mlp.packed_weight import PackedWeight


@torch.no_grad()
def freeze_experts(
    model: nn.Module,
    recipe: Recipe | str | None,
    *,
    path: str | Path | None = None,
    prefix: str = "",
    device: torch.device | str | None = None,
    weights: Literal["codes", "packed"] = "codes",
    exact: bool = True,
    seed: int | Tensor | None = None,
    backend: str | Sequence[str] | None = None,
    form: Literal["keep_all", "standard", "lean", "recompute"] = "standard",
) -> tuple[str, ...]:
    """Replace the weights of a transformers model's experts by CodedWeights, in place; returns the modules' names.

    recipe          a Recipe or its name, whose fprop and dgrad read codes, and whose codes depend on the values alone
    path            files whose codes become the weights, as `load_experts` reads them; the model may then be on the
                    meta device. None: the model's own values are quantized, one weight at a time
    prefix, exact   with a path, as `load_experts` has them. Names of modules that transformers renames while it loads a
                    file, such as Mixtral's, are translated back by its own renamings
    device          with a path, where the weights go; None: where the experts are
    weights         "packed": keep the four bits of MXFP4 files, as `load_experts` does, and expand them in each call.
                    Then the recipe may also be a high-precision one
    seed, backend   as `octavo_torch.adapters.transformers.experts` has them
    form            what is kept for the backward of experts without adapters; "recompute" also with adapters

    The experts' weights and biases no longer require a gradient: forward and x's gradient read the codes, and no weight
    gradient is computed. Weights that are stored transposed, as gpt-oss's, are [E, N, K] afterwards, and the module's
    `is_transposed` is False. Raises ValueError, before anything has changed, for a model without experts that
    transformers dispatches, for experts with another activation than `moe_mlp`'s, and as `load_experts` does.
    """
    check_module(model)
    function = experts(recipe, seed=seed, backend=backend, form=form, weight_codes="keep")
    chosen = function.product.how["recipe"]
    values = [gemm for gemm in ("fprop", "dgrad") if not chosen.quantizes(gemm)]
    one_of("weights", weights, ("codes", "packed"))
    if weights == "packed" and path is None:
        raise ValueError("weights is 'packed' and path is None; give the path of MXFP4 files, or weights='codes'")
    if values and weights == "codes":
        raise ValueError(
            f"recipe is {chosen.kind}, of which {values[0]} reads the weights' values; give one whose fprop and dgrad "
            "are quantized, such as 'fp8-block'"
        )
    found = dict(_experts_of(model))
    if not found:
        raise ValueError(
            "model has no experts that transformers dispatches; give one of transformers' models with experts, or "
            "octavo_torch's modules inside of quantized_parameters"
        )
    for name, module in found.items():
        _check_memory(name, module, from_files=path is not None)
        check_values(name, module)
        if activation_of(module) is None:
            raise ValueError(
                f"the experts {name or 'model'} compute an activation that moe_mlp does not have, so that their own "
                "function runs between two products, which read values; give a part of the model without them, and "
                "convert these by octavo_torch.convert"
            )
    if path is None:
        coded = _quantized(found, function.product)
    else:
        check_path("path", path)
        in_files = names_in_files(model, tuple(found), path, prefix)
        like = _modules_like({in_files[name]: module for name, module in found.items()}, chosen, backend)
        place = _device_of(found) if device is None else device
        load_experts(like, path, prefix=prefix, weights=weights, exact=exact, device=place)
        coded = {name: cast(GroupedMLP, like.get_submodule(in_files[name])) for name in found}
    for name, module in found.items():
        _replace(module, coded[name], function)
    return tuple(found)


def _experts_of(model: nn.Module) -> Iterator[tuple[str, ExpertsModule]]:
    for name, module in model.named_modules():
        if is_dispatched(module):
            yield name, cast(ExpertsModule, module)


def _check_memory(name: str, module: ExpertsModule, *, from_files: bool) -> None:
    """ValueError where weights have no values to quantize, or where accelerate would bring the old ones back."""
    weight = getattr(module, names_of(module)[0])
    if weight.is_meta and hasattr(module, "_hf_hook"):
        raise ValueError(
            f"the experts {name or 'model'} are offloaded by accelerate, which brings their values back for each call; "
            "load the model without offloading, or onto the meta device, and freeze it before it is dispatched"
        )
    if from_files:
        return
    if weight.is_meta:
        raise ValueError(
            f"path is None and the experts {name or 'model'} are on the meta device; give the path of files with "
            "codes, or a model that has values"
        )
    if isinstance(weight, CodedWeight | PackedWeight):
        raise ValueError(
            f"path is None and the experts {name or 'model'} are codes alone already; give the path of files with "
            "other codes, or a model that has values"
        )


def _device_of(found: dict[str, ExpertsModule]) -> torch.device | None:
    """The device of all of the experts; None for the meta device, for which load_experts raises ValueError."""
    devices = {projections(module)[0][0].device for module in found.values()}
    if len(devices) > 1:
        raise ValueError(
            f"device is None and the experts are on {', '.join(sorted(map(str, devices)))}; give one device, or freeze "
            "a part of the model at a time"
        )
    (device,) = devices
    return None if device.type == "meta" else device


def _like(module: ExpertsModule, recipe: Recipe, backend: str | Sequence[str] | None) -> GroupedMLP:
    """A GroupedMLP of the experts' shapes, on the meta device."""
    (first, bias), (second, _) = projections(module)
    activation = activation_of(module)
    assert activation is not None  # freeze_experts has refused what has none
    return GroupedMLP(
        int(first.shape[0]), int(first.shape[2]), int(second.shape[2]), int(second.shape[1]),
        activation=activation, bias=bias is not None, recipe=recipe, device="meta", dtype=first.dtype,
        backend=backend, interleave=block_of(module),
    )  # fmt: skip


def _modules_like(found: dict[str, ExpertsModule], recipe: Recipe, backend: str | Sequence[str] | None) -> nn.Module:
    """Modules of the experts' names, into which files are loaded."""
    tree = nn.Module()
    for name, module in found.items():
        parent = tree
        *way, last = name.split(".")
        for part in way:
            if part not in parent._modules:
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        parent.add_module(last, _like(module, recipe, backend))
    return tree


def _quantized(found: dict[str, ExpertsModule], product: GroupedMM) -> dict[str, GroupedMLP]:
    """Modules whose weights are the codes of the experts' own values."""
    coded = {}
    for name, module in found.items():
        like = _like(module, **product.how)
        for number, (weight, bias) in enumerate(projections(module), start=1):
            # a weight that takes a gradient gets both planes, of which dgrad reads the second
            leaf = weight.detach().contiguous().requires_grad_()
            codes, block = quantize_own_values(leaf, interleave=like.interleave if number == 1 else None, **product.how)
            coded_weight = CodedWeight(codes, like.recipe, leaf.dtype, block)
            like._parameters[f"weight{number}"] = nn.Parameter(coded_weight, requires_grad=False)
            if bias is not None:
                like._parameters[f"bias{number}"] = nn.Parameter(bias.detach(), requires_grad=False)
        coded[name] = like
    return coded


def _replace(module: ExpertsModule, coded: GroupedMLP, function: ExpertsFunction) -> None:
    """Give the module the parameters of `coded`, and `function` as its forward."""
    own = cast(nn.Module, module)
    for number, name in enumerate(names_of(module), start=1):
        for source, target in ((f"weight{number}", name), (f"bias{number}", f"{name}_bias")):
            value = coded._parameters.get(source)
            if value is not None:
                value.requires_grad_(False)
                own._parameters[target] = value
    module.is_transposed = False
    run_by(own, function)
