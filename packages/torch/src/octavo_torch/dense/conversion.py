"""convert_linears: torch's linear layers in a model become Linear, in place, with the parameters that they have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from octavo import Recipe
from octavo_torch.arrays.checks import brief, known_backends
from octavo_torch.arrays.dtypes import DTYPE_NAMES, name_of
from octavo_torch.arrays.selection import Selection, check_filter, listed, selects
from octavo_torch.dense.module import Linear
from octavo_torch.dispatch.device import CUDA_MULTIPLE
from octavo_torch.dispatch.recipes import recipe_of
from octavo_torch.scaling.changed_recipe import set_recipe
from octavo_torch.scaling.seeds import check_base_seed

_HOOKS = (
    *("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"),
    *("_state_dict_pre_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)


def convert_linears(
    model: nn.Module,
    recipe: Recipe | str | None,
    filter: Selection,
    *,
    seed: int | None = None,
    backend: str | Sequence[str] | None = None,
) -> tuple[str, ...]:
    """Replace torch.nn.Linear modules in `model` by Linear, in place; returns the names of the replaced modules.

    recipe    a Recipe or its name; None: high precision
    filter    selects among the torch.nn.Linear modules: a pattern of whole names such as
              "model.layers.*.self_attn.*_proj", or a function of name and module. Leave out the head of a language
              model and routers, whose results should stay in high precision
    seed      base of stochastic rounding's seeds; None: each layer draws one from torch's generator
    backend   a name or a closed list of names

    Parameters are the same objects under the same names: optimizers that hold them, checkpoints and tied weights stay
    as they are. So do the mode (training or not) and attributes that other libraries have set. A module that has
    several names is replaced under all of them. A recipe with a state adds its buffers, on the weights' devices.

    Raises ValueError, before anything has changed, for arguments that do not fit, for a filter that selects nothing,
    and for what a Linear cannot replace: the model itself, subclasses of torch.nn.Linear, modules with hooks,
    parametrizations or a forward of their own, features that are not multiples of 16, weights in other dtypes than
    bf16, fp16 and fp32, and models that FSDP, tensor parallelism or DistributedDataParallel has wrapped. Code that
    reads a module's weight without calling the module finds it as before.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is {brief(model)}; give a torch.nn.Module")
    check_filter(filter, needed=True)
    check_base_seed(seed)
    known_backends(backend)
    chosen = recipe_of(recipe)
    _check_unwrapped(model)
    selected: dict[nn.Linear, str] = {}
    for name, module in _linears(model):
        if module not in selected and selects(filter, name, module):
            selected[module] = name
    if not selected:
        raise ValueError(_nothing(model))
    for module, name in selected.items():
        _check_replaceable(name, module)
    places = [
        (parent, child, module)
        for parent in model.modules()
        for child, module in parent._modules.items()
        if isinstance(module, nn.Linear) and module in selected
    ]
    for parent, _, module in places:
        # its fast path for evaluation reads the weights and calls no module
        if isinstance(parent, nn.TransformerEncoderLayer):
            raise ValueError(
                f"{selected[module]} belongs to a torch.nn.TransformerEncoderLayer, which multiplies "
                "by its weight itself in evaluation; leave it out"
            )
    replacements = {module: _linear_of(module, chosen, seed, backend) for module in selected}
    for parent, child, module in places:
        parent._modules[child] = replacements[module]
    return tuple(selected.values())


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Linear):
            yield name, module


def _nothing(model: nn.Module) -> str:
    names = [name for name, _ in _linears(model)]
    if not names:
        return "model has no torch.nn.Linear; give one that has, or use octavo_torch.convert for grouped layers"
    return f"filter matches none of the model's Linear modules; give names among {listed(names)}"


def _check_unwrapped(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule | FullyShardedDataParallel | DistributedDataParallel):
            kind = "FSDP2" if isinstance(module, FSDPModule) else type(module).__name__
            raise ValueError(
                f"{name or 'model'} was wrapped by {kind}, which knows the modules and buffers that it found; convert "
                "first, and wrap afterwards"
            )


def _check_replaceable(name: str, module: nn.Linear) -> None:
    """Raises ValueError where a Linear would not compute what the module does, or would lose a part of it."""
    if not name:
        raise ValueError(
            "model is the Linear itself, so there is no module in which to replace it; give the module that contains "
            "it, or create an octavo_torch.Linear"
        )
    if isinstance(module, Linear):
        raise ValueError(f"{name} is an octavo_torch.Linear already; octavo_torch.convert gives it another recipe")
    if "parametrizations" in module._modules:
        raise ValueError(f"{name} has a parametrization, which would be lost; remove it, or leave {name} out")
    if type(module) is not nn.Linear:
        raise ValueError(
            f"{name} is a {type(module).__module__}.{type(module).__qualname__}, which may compute something else than "
            f"torch.nn.Linear; leave {name} out"
        )
    hooks = [kind for kind in _HOOKS if getattr(module, kind)]
    if hooks:
        raise ValueError(f"{name} has {', '.join(hooks)}, which would be lost; add them after the conversion")
    if "forward" in module.__dict__ or module._compiled_call_impl is not None:
        raise ValueError(
            f"the forward of {name} was replaced or compiled, which would be lost; do that after the conversion"
        )
    if set(module._parameters) != {"weight", "bias"} or module._buffers or module._modules:
        raise ValueError(f"{name} holds other things than a weight and a bias; leave it out")
    for own, value in module.named_parameters():
        if isinstance(value, DTensor):
            raise ValueError(f"{own} of {name} is sharded over {value.device_mesh}; convert before that")
        if value.dtype not in DTYPE_NAMES:
            raise ValueError(
                f"{own} of {name} has dtype {name_of(value.dtype)}; Linear takes bfloat16, float16 and float32"
            )
    sides = {"in_features": module.in_features, "out_features": module.out_features}
    for side, features in sides.items():
        if features < 1 or features % CUDA_MULTIPLE:
            raise ValueError(
                f"{name} has {side}={features}, and kernels on GPUs take multiples of {CUDA_MULTIPLE}; leave {name} out"
            )


def _linear_of(module: nn.Linear, recipe: Recipe, seed: int | None, backend: str | Sequence[str] | None) -> Linear:
    """A Linear that has the very parameters of `module`, and its other attributes."""
    parameters = cast("dict[str, Tensor | None]", module._parameters)
    has_bias = parameters["bias"] is not None
    linear = Linear(module.in_features, module.out_features, has_bias, "meta", recipe=None, backend=backend)
    linear._parameters.update(module._parameters)
    for attribute, value in module.__dict__.items():
        if attribute not in linear.__dict__:
            linear.__dict__[attribute] = value
    set_recipe(linear, recipe, seed, backend)
    return linear.train(module.training)
