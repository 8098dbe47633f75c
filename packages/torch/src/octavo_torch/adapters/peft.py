"""LoRA of grouped weights through PEFT: LoraConfig's target_parameters, PEFT's files, Octavo's products.

    from octavo_torch.adapters.peft import prepare

    config = LoraConfig(r=16, target_modules=["q_proj", "v_proj"], target_parameters=["gate_up_proj", "down_proj"])
    model = get_peft_model(model, prepare(config, model))

PEFT alone adds B A to every expert's weight in each forward, which needs values of the weights and memory for a copy of
them. Here the same parameters, in the same files, are two narrow products beside the weights, which may be codes alone.
Written for PEFT 0.21.2, whose ParamWrapper this replaces by `LoraConfig._register_custom_module`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from typing import Any, Protocol

from torch import Tensor, nn

from octavo_torch.adapters.grouped_mm import misfit
from octavo_torch.adapters.transformers import ExpertsFunction, function_of, is_dispatched
from octavo_torch.arrays.checks import brief, check_module
from octavo_torch.linear.call import Adapter
from octavo_torch.linear.coded_weight import CodedWeight
from octavo_torch.linear.module import GroupedLinear
from octavo_torch.lora.low_rank import LowRank, SumOfAdapters
from octavo_torch.mlp.experts import Experts
from octavo_torch.mlp.packed_weight import PackedWeight

TESTED = "0.21.2"


class Config(Protocol):
    """The method of a peft.LoraConfig that is called."""

    def _register_custom_module(self, mapping: dict[type[nn.Module], Callable[..., nn.Module]]) -> None: ...


def prepare(config: Config, model: nn.Module) -> Config:
    """Have PEFT put Octavo's wrappers around the grouped weights in `model` that `config` targets; returns `config`.

    config   a peft.LoraConfig with target_parameters, such as ["experts.gate_up_proj", "experts.down_proj"] of a model
             of transformers, or ["experts.weight1"] of GroupedMLP and MoE; a GroupedLinear's "weight" may also be
             targeted as a module. PEFT saves none of this: prepare the configuration of a saved adapter, too, and give
             it to PeftModel.from_pretrained(..., config=)
    model    experts of transformers in it are served where `freeze_experts`, `octavo_torch.convert` or the name of
             `octavo_torch.adapters.transformers.register` has them run Octavo's function

    Raises ValueError where the model has no grouped weights, or experts that another function runs; AdapterError where
    peft is absent or has no such seam.
    """
    check_module(model)
    try:
        register = config._register_custom_module
    except AttributeError as error:
        raise ValueError(f"config is {brief(config)}; give a peft.LoraConfig") from error
    wrapper = _wrapper()
    kinds = {type(module) for module in _served(model)}
    if not kinds:
        raise ValueError(
            "model has no grouped weights; give one with GroupedLinear, GroupedMLP, MoE or experts of transformers; an "
            "octavo_torch.Linear needs no wrapper of Octavo's, since PEFT takes it for torch's"
        )
    register(dict.fromkeys(kinds, wrapper))
    return config


def _served(model: nn.Module) -> Iterator[nn.Module]:
    for name, module in model.named_modules():
        if isinstance(module, GroupedLinear | Experts):
            yield module
        elif is_dispatched(module):
            _check_function(module, name or "model")
            yield module


def _check_function(module: nn.Module, name: str | None = None) -> None:
    """ValueError for experts of transformers that another function runs, which takes no adapters."""
    if is_dispatched(module) and not isinstance(function_of(module), ExpertsFunction):
        raise ValueError(
            f"the experts {name or type(module).__name__} run another function than Octavo's; call freeze_experts or "
            "octavo_torch.convert first, or give octavo_torch.adapters.transformers.register's name as "
            "experts_implementation"
        )


@cache
def _wrapper() -> type[nn.Module]:
    """PEFT's ParamWrapper with another forward. The class is created at first use, because its base imports peft."""
    try:
        theirs: Any = import_module("peft.tuners.lora.layer").ParamWrapper
    except (ImportError, AttributeError) as error:
        raise misfit("peft", TESTED, "tuners.lora.layer.ParamWrapper") from error

    class ParamWrapper(theirs):  # type: ignore[misc]  # PEFT asks for a class of just this name
        """The A and B of one grouped weight; the wrappers of one module's weights are nested."""

        def __init__(self, base_layer: nn.Module, adapter_name: str, parameter_name: str | None = None, **kwargs: Any):
            inner = base_layer.get_base_layer() if isinstance(base_layer, theirs) else base_layer
            if parameter_name is None and isinstance(inner, GroupedLinear):
                parameter_name = "weight"
            if parameter_name not in _weights(inner):
                raise ValueError(
                    f"{parameter_name or 'the module'} of {type(inner).__name__} cannot take adapters; "
                    f"give LoraConfig target_parameters that end in {' or '.join(_weights(inner))}"
                )
            super().__init__(base_layer, adapter_name, parameter_name=parameter_name, **kwargs)

        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            """The module's result, with the active adapters of its weights."""
            self._check_forward_args(x, *args, **kwargs)
            kwargs.pop("adapter_names", None)
            layers = list(self._layers())
            base = self.get_base_layer()
            if self.disable_adapters:
                for layer in layers:
                    if layer.merged:
                        layer.unmerge()
                y: Tensor = base(x, *args, **kwargs)
                return y
            parts = {layer.parameter_name: layer._adapter() for layer in layers if not layer.merged}
            added = tuple(parts.get(name) for name in _weights(base))
            if any(part is not None for part in added):
                _check_function(base)
                kwargs["lora"] = added[0] if isinstance(base, GroupedLinear) else added
            y = base(x, *args, **kwargs)
            return y

        def _layers(self) -> Iterator[ParamWrapper]:
            layer: nn.Module = self
            while isinstance(layer, ParamWrapper):
                yield layer
                layer = layer.base_layer

        def _adapter(self) -> Adapter | None:
            """The active adapters of this wrapper's weight."""
            names = [name for name in self.active_adapters if name in self.lora_A]
            if not names:
                return None
            parts = [LowRank(*self._factors(name), self.scaling[name], backend=_backend(self)) for name in names]
            return parts[0] if len(parts) == 1 else SumOfAdapters(parts)

        def _factors(self, name: str) -> tuple[Tensor, Tensor]:
            """A [G, r, K] and B [G, N, r], of A [G r, K] and B [N, r G]."""
            a, b = self.lora_A[name].weight, self.lora_B[name].weight
            groups = self.num_experts
            return (
                a.reshape(groups, -1, a.shape[-1]),
                b.reshape(b.shape[0], -1, groups).permute(2, 0, 1).contiguous(),
            )

        def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
            """As PEFT's; ValueError for weights that are codes alone."""
            if isinstance(self.get_param(), CodedWeight | PackedWeight):
                raise ValueError(
                    f"{self.parameter_name} is codes alone, which would round the sum; keep the adapter beside it, or "
                    "merge into a model of values"
                )
            super().merge(safe_merge=safe_merge, adapter_names=adapter_names)

    return ParamWrapper


def _weights(module: nn.Module) -> tuple[str, ...]:
    """The names of a module's grouped weights, in the order of its products."""
    if isinstance(module, GroupedLinear):
        return ("weight",)
    if isinstance(module, Experts):
        return "weight1", "weight2"
    gated = getattr(module, "has_gate", True)
    return "gate_up_proj" if gated else "up_proj", "down_proj"


def _backend(wrapper: Any) -> Any:
    base = wrapper.get_base_layer()
    if isinstance(base, GroupedLinear | Experts):
        return base.backend
    function = function_of(base)
    return function.product.backend if isinstance(function, ExpertsFunction) else None
