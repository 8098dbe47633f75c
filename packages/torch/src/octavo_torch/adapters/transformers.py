"""An experts function for Hugging Face transformers, written for transformers 5.23 (5.17 and later).

    from octavo_torch.adapters.transformers import register

    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation=register(octavo.recipe("mxfp8")))

Every experts module that transformers dispatches then runs the recipe, forward and backward, with any biases, gates and
orientation of weights; where its activation is one of ours, Qwen3-MoE's and gpt-oss's among them, it is one `moe_mlp`,
which keeps x once per token. transformers silently falls back to its own loop where a model's experts are not
dispatched at all: check `model.get_experts_implementation()`; the tests count calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from octavo import Recipe
from octavo_registry.contract.cards import Activation
from octavo_torch.adapters.grouped_mm import GroupedMM, misfit
from octavo_torch.arrays.checks import backend_names
from octavo_torch.arrays.dtypes import name_of
from octavo_torch.mlp.adapted import Adapters, run_adapted
from octavo_torch.mlp.call import MlpCall
from octavo_torch.mlp.mlp import OptionalOperands
from octavo_torch.mlp.packed_weight import PackedWeight
from octavo_torch.moe.forms import Form, WeightCodes, check_form, check_weight_codes
from octavo_torch.moe.moe import moe_mlp
from octavo_torch.moe.rows.permutation import permute, through_rows, unpermute

TESTED = "5.23.0"

# by class name: transformers has several classes for one function
_GATED: dict[str, Activation] = {
    "SiLU": "swiglu", "SiLUActivation": "swiglu", "GELUActivation": "geglu", "GELUTanh": "geglu_tanh",
}  # fmt: skip
_PLAIN: dict[str, Activation] = {
    "SiLU": "silu", "SiLUActivation": "silu", "GELUActivation": "gelu", "GELUTanh": "gelu_tanh",
    "ReLUSquaredActivation": "relu2",
}  # fmt: skip
# by the method that a class has itself: a subclass with another one has another name for it
_CLAMPED = {
    "GptOssExperts._apply_gate": ("alpha", "limit"),
    "OpenAIPrivacyFilterExperts._apply_gate": ("alpha", "limit"),
    "MiniMaxM3VLExperts._apply_gate": ("swiglu_alpha", "swiglu_limit"),
}
_CLAMPED_BY = (1.702, 7.0)


def register(
    recipe: Recipe | str | None,
    *,
    seed: int | Tensor | None = None,
    backend: str | Sequence[str] | None = None,
    name: str | None = None,
    form: Literal["keep_all", "standard", "lean", "recompute"] = "standard",
    weight_codes: Literal["keep", "remake"] = "keep",
) -> str:
    """Register `experts(recipe, ...)` with transformers; returns the name for `experts_implementation=`.

    name                 an existing function of that name is replaced, for models that use it, too. None: "octavo-" and
                         the recipe's kind, and a number where that name is another recipe's or another way to run it
    form, weight_codes   see `experts`

    Raises what `experts` raises, and AdapterError where transformers has no registry of experts functions.
    """
    function = experts(recipe, seed=seed, backend=backend, form=form, weight_codes=weight_codes)
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise misfit("transformers", TESTED, "integrations.moe.ALL_EXPERTS_FUNCTIONS") from error
    chosen = name or _free_name(function, ALL_EXPERTS_FUNCTIONS)
    ALL_EXPERTS_FUNCTIONS.register(chosen, function)
    return chosen


def _free_name(function: ExpertsFunction, registered: Mapping[str, Callable[..., Tensor]]) -> str:
    """The first of "octavo-KIND", "octavo-KIND-2" and so on that no other function has: models ask for theirs by name
    at every call."""
    first = f"octavo-{function.product.how['recipe'].kind}"
    chosen, number = first, 1
    while (known := registered.get(chosen)) is not None:
        if isinstance(known, ExpertsFunction) and known.does_as(function):
            break
        number += 1
        chosen = f"{first}-{number}"
    return chosen


def experts(
    recipe: Recipe | str | None,
    *,
    seed: int | Tensor | None = None,
    backend: str | Sequence[str] | None = None,
    form: Literal["keep_all", "standard", "lean", "recompute"] = "standard",
    weight_codes: Literal["keep", "remake"] = "keep",
) -> ExpertsFunction:
    """The function that transformers calls instead of an experts module's forward.

    recipe, seed, backend   as GroupedMM has them
    form, weight_codes      what `moe_mlp` keeps for the backward, of experts with a known activation

    Raises what GroupedMM raises, and ValueError for an unknown form.
    """
    return ExpertsFunction(GroupedMM(recipe, seed, backend), check_form(form), check_weight_codes(weight_codes))


class ExpertsModule(Protocol):
    """What is read of an experts module, besides its weights `gate_up_proj`, or `up_proj`, and `down_proj`."""

    has_gate: bool
    has_bias: bool
    is_transposed: bool
    is_concatenated: bool
    act_fn: Callable[[Tensor], Tensor]
    post_expert_norm: Callable[[Tensor], Tensor]

    def _apply_gate(self, gate_up: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class ExpertsFunction:
    """hidden_states [T, H], top_k_index [T, k], top_k_weights [T, k] -> [T, H], with a module's parameters.

    An index outside of the module's experts, as expert parallelism leaves it, costs no row. Experts with a known
    activation are one `moe_mlp`, where each choice's weight multiplies the activation in fp32; otherwise the module's
    own function runs between two products, and the weights multiply the result.
    """

    product: GroupedMM
    form: Form = "standard"
    weight_codes: WeightCodes = "keep"

    def does_as(self, other: ExpertsFunction) -> bool:
        """Whether both run the same recipe in the same way; seeds in tensors may change, so they are compared as
        objects."""
        one, two = self.product, other.product
        if isinstance(one.seed, Tensor) or isinstance(two.seed, Tensor):
            same_seed = one.seed is two.seed
        else:
            same_seed = one.seed == two.seed
        ways = [(f.product.recipe, f.product.backend, f.form, f.weight_codes) for f in (self, other)]
        return same_seed and ways[0] == ways[1]

    def __call__(
        self,
        module: ExpertsModule,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        lora: Adapters | None = None,
    ) -> Tensor:
        """The module's result. `lora`: added to the products of both projections, see octavo_torch.GroupedMLP."""
        product = self.product
        first, second = projections(module)
        activation = activation_of(module)
        if activation is not None:
            seed = product.seed_on(hidden_states.device)
            if lora is None and isinstance(first[0], PackedWeight):
                lora = None, None  # run_adapted expands packed weights, and moe_mlp takes none
            if lora is not None:
                call = MlpCall(
                    product.how["recipe"], backend_names(product.backend), seed=seed, activation=activation,
                    interleave=block_of(module),
                )  # fmt: skip
                return self._adapted((hidden_states, top_k_index, top_k_weights), first, second, call, lora)
            return moe_mlp(
                hidden_states, top_k_index, top_k_weights, first[0], second[0], activation=activation,
                interleave=block_of(module), bias1=first[1], bias2=second[1], form=self.form,
                weight_codes=self.weight_codes, seed=seed, **product.how,
            )  # fmt: skip
        rows, sizes, routing = permute(hidden_states, top_k_index, first[0].shape[0])
        ends = torch.cumsum(sizes, 0)
        added = (None, None) if lora is None else lora
        h = product(rows, first[0].transpose(1, 2), ends, first[1])
        h = h if added[0] is None else added[0].added_to(h, rows, sizes)
        h = module._apply_gate(h) if module.has_gate else module.act_fn(h)
        y = product(h, second[0].transpose(1, 2), ends, second[1])
        y = y if added[1] is None else added[1].added_to(y, h, sizes)
        if getattr(module, "has_post_expert_norm", False):
            y = module.post_expert_norm(y)
        return unpermute(y, routing, top_k_weights)

    def _adapted(
        self,
        routed: tuple[Tensor, Tensor, Tensor],
        first: Projection,
        second: Projection,
        call: MlpCall,
        lora: Adapters,
    ) -> Tensor:
        """`moe_mlp` with adapters."""

        def run(rows: Tensor, sizes: Tensor, probs: Tensor) -> Tensor:
            optional = OptionalOperands(probs, first[1], second[1], None if second[1] is None else probs)
            return run_adapted(rows, first[0], second[0], sizes, optional, call, lora)

        return through_rows(*routed, first[0].shape[0], run, recompute=self.form == "recompute", backend=call.backend)


def is_dispatched(module: nn.Module) -> bool:
    """Whether transformers dispatches this module's forward to an experts function."""
    return {*dir(module)} >= {"has_gate", "is_transposed", "down_proj"}


def check_values(name: str, module: ExpertsModule) -> None:
    """ValueError for experts whose weights are another library's codes, with scales that no function here reads."""
    for weight in names_of(module):
        dtype = getattr(module, weight).dtype
        if dtype.itemsize == 1 or not dtype.is_floating_point:
            raise ValueError(
                f"the {weight} of experts {name or 'model'} is {name_of(dtype)}, codes of another library with scales "
                "of its own; load the model with its values, as FineGrainedFP8Config(dequantize=True) does, or give a "
                "model on the meta device to freeze_experts(model, recipe, path=...), which takes the file's codes"
            )


def run_by(module: nn.Module, function: ExpertsFunction) -> None:
    """Let `function` be the module's forward, inside of accelerate's hooks where it has such."""
    setattr(module, _forward_name(module), partial(function, cast(ExpertsModule, module)))


def function_of(module: nn.Module) -> object:
    """What runs the forward of experts that transformers dispatches."""
    own = vars(module).get(_forward_name(module))
    if isinstance(own, partial):
        return own.func
    if own is not None and getattr(own, "__func__", None) is not type(module).forward:
        return None
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return None
    config = getattr(module, "config", None)
    found: object = ALL_EXPERTS_FUNCTIONS.get(getattr(config, "_experts_implementation", None), None)
    return found


def _forward_name(module: nn.Module) -> str:
    """The attribute that holds a module's own forward: accelerate's hooks replace `forward`, and call the old one."""
    return "_old_forward" if hasattr(module, "_hf_hook") else "forward"


Projection = tuple[Tensor, Tensor | None]
"""Weight [G, N, K] and bias."""


def names_of(module: ExpertsModule) -> tuple[str, str]:
    """The names of both projections' weights."""
    return "gate_up_proj" if module.has_gate else "up_proj", "down_proj"


def block_of(module: ExpertsModule) -> int | None:
    """Rows of a block where gate and up projection take turns; None: the gate half comes first, or there is none."""
    return None if not module.has_gate or module.is_concatenated else 1


def projections(module: ExpertsModule) -> tuple[Projection, Projection]:
    """Both projections."""
    found = []
    for name in names_of(module):
        weight = getattr(module, name)
        bias = getattr(module, f"{name}_bias") if module.has_bias else None
        found.append((weight.transpose(1, 2) if module.is_transposed else weight, bias))
    return found[0], found[1]


def activation_of(module: ExpertsModule) -> Activation | None:
    """The activation's name in `moe_mlp`; None where the module does something else between its projections."""
    if getattr(module, "has_post_expert_norm", False):
        return None
    if not module.has_gate:
        return _PLAIN.get(_kind_of(module.act_fn))
    gate = _gate_of(type(module))
    if gate in _CLAMPED:
        given = tuple(getattr(module, name) for name in _CLAMPED[gate])
        return "clamped_swiglu" if given == _CLAMPED_BY else None
    if not module.is_concatenated or not gate.endswith("_default_apply_gate"):
        return None
    return _GATED.get(_kind_of(module.act_fn))


def _kind_of(act_fn: Callable[[Tensor], Tensor]) -> str:
    """The name of an activation's class; LFM2's is torch's function."""
    return "SiLU" if act_fn is silu else type(act_fn).__name__


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator,unused-ignore]
def _gate_of(of: type) -> str:
    """The qualified name of the method with which a class of experts applies its gate; "" where it has none.

    It is a constant to Dynamo, which in torch 2.13 takes a traced `__qualname__` for unequal to every string and cannot
    look it up in a dictionary. It takes the class, because Dynamo would compile again for each module that it is given.
    """
    return getattr(getattr(of, "_apply_gate", None), "__qualname__", "")
