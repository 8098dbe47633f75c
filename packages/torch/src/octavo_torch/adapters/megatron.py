"""Megatron-LM's experts on our grouped linear layers, written for megatron-core 0.16.1.

    from octavo_torch.adapters.megatron import builders

    fc1, fc2 = builders(octavo.recipe("block"))
    experts = TEGroupedMLP(count, config, MLPSubmodules(linear_fc1=fc1, linear_fc2=fc2), pg_collection)

Other options come from `config`: `gradient_accumulation_fusion` writes weight gradients into `main_grad`,
`delay_wgrad_compute` leaves them to `backward_dw()`. Leave its `fp8` and `fp4` unset: then nothing is padded.
Parameters are `weight{i}` and `bias{i}`, one per expert, and keys of distributed checkpoints are those of
TEGroupedLinear, without `_extra_state`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from octavo import Recipe
from octavo_torch.adapters.grouped_mm import misfit
from octavo_torch.adapters.megatron_types import Config, Offsets, ProcessGroups
from octavo_torch.linear.module import GroupedLinear
from octavo_torch.lora.module import GroupedLoRA
from octavo_torch.moe.parallel.group import ExpertGroup
from octavo_torch.moe.parallel.own_experts import replicas

TESTED = "0.16.1"


def builders(
    recipe: Recipe | None, *, backend: str | Sequence[str] | None = None, seed: int | None = None
) -> tuple[type[ExpertLinear], type[ExpertLinear]]:
    """Classes for fc1, whose outputs tensor parallelism splits, and for fc2, whose inputs it splits.

    recipe, backend, seed   as in GroupedLinear, state of delayed scaling included (`octavo_torch.update_scales`)
    """
    how = {"recipe": recipe, "backend": backend, "seed": seed}
    fc1 = type("OctavoColumnParallelExperts", (ExpertLinear,), {"how": how, "split": 0})
    fc2 = type("OctavoRowParallelExperts", (ExpertLinear,), {"how": how, "split": 1})
    return fc1, fc2


class ExpertLinear(GroupedLinear):
    """`GroupedLinear` as Megatron builds and calls it; `builders` returns subclasses.

    how     the recipe, backend and seed of GroupedLinear
    split   side of the weights that tensor parallelism splits: 0 outputs, 1 inputs. The dispatcher exchanges the rows
    """

    how: ClassVar[dict[str, Any]] = {"recipe": None}
    split: ClassVar[int] = 0

    def __init__(
        self,
        num_local_experts: int,
        input_size: int,
        output_size: int,
        /,
        *,
        config: Config,
        init_method: Callable[[Tensor], object],
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool = True,
        tp_comm_buffer_name: str | None = None,
        pg_collection: ProcessGroups | None = None,
        name: str | None = None,
    ) -> None:
        if not is_expert or getattr(config, "fp8", None) or getattr(config, "fp4", None):
            raise ValueError(
                f"is_expert is {is_expert!r}, config.fp8 {config.fp8!r} and config.fp4 {config.fp4!r}; build experts, "
                "with fp8 and fp4 None: the recipe given to builders() is what they compute in"
            )
        groups = _global_groups() if pg_collection is None else pg_collection
        parts = 1 if groups.expt_tp is None else groups.expt_tp.size()
        sides = [output_size, input_size]
        if sides[self.split] % parts:
            raise ValueError(
                f"{('output_size', 'input_size')[self.split]} is {sides[self.split]} and expt_tp has {parts} ranks; "
                "give a multiple of that"
            )
        sides[self.split] //= parts
        device = "cpu" if config.use_cpu_initialization else "meta" if config.init_model_with_meta_device else "cuda"
        super().__init__(
            num_local_experts, sides[1], sides[0],
            bias=bias and not skip_bias_add, device=device, dtype=config.params_dtype, per_group_parameters=True,
            main_grad="accumulate" if config.gradient_accumulation_fusion else None,
            delay_wgrad=config.delay_wgrad_compute, **self.how,
        )  # fmt: skip
        self.pg_collection, self._returns_bias = groups, bias and skip_bias_add
        for index in range(num_local_experts) if self._returns_bias else ():
            own = torch.empty(sides[0], device=device, dtype=config.params_dtype)
            self.register_parameter(f"bias{index}", nn.Parameter(own))
        if config.perform_initialization:
            with torch.no_grad(), _random_of_experts(device):
                for key, parameter in self.named_parameters():
                    init_method(parameter) if key.startswith("weight") else parameter.zero_()
        for parameter in self.parameters():
            parameter.allreduce = config.expert_model_parallel_size <= 1  # type: ignore[attr-defined]

    def forward(self, x: Tensor, tokens_per_expert: Tensor | Sequence[int], /) -> tuple[Tensor, list[Tensor] | None]:  # type: ignore[override]
        """y, and each expert's bias where Megatron adds it; tokens_per_expert is a list, or a tensor on x's device."""
        y = super().forward(x, tokens_per_expert)
        biases = [getattr(self, f"bias{index}") for index in range(self.num_groups)] if self._returns_bias else None
        return y, biases

    def _replicas(self, process_group: ProcessGroup) -> ProcessGroup | None:
        """As MoE's: amax covers the tokens of the ranks that share the experts, and is not mixed with theirs."""
        return replicas(ExpertGroup(self.pg_collection.ep), process_group)

    def backward_dw(self, count: int | None = None) -> None:
        """Compute the weight gradients that `delay_wgrad_compute` has postponed; does nothing where that is off."""
        if self.delayed_wgrad is not None:
            super().backward_dw(count)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Offsets = (), metadata: dict[str, object] | None = None
    ) -> dict[str, object]:
        """Each expert's parameters under SequentialMLP's keys, and the recipe's state.

        Raises ValueError for a layer with adapters.
        """
        adapters = [name for name, child in self.named_children() if isinstance(child, GroupedLoRA)]
        if adapters:
            raise ValueError(
                f"the layer {prefix.removesuffix('.') or 'of experts'} has adapters ({', '.join(adapters)}), for which "
                "SequentialMLP's checkpoints have no keys; save the adapters' own state_dict, or end them by merge_lora"
            )
        from octavo_torch.adapters.megatron_checkpoint import sharded

        return sharded(self, self.pg_collection, self.split, prefix, sharded_offsets, metadata)


def _global_groups() -> ProcessGroups:
    try:
        from megatron.core.process_groups_config import ProcessGroupCollection  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise misfit("megatron-core", TESTED, "process_groups_config.ProcessGroupCollection") from error
    groups: ProcessGroups = ProcessGroupCollection.use_mpu_process_groups()
    return groups


def _random_of_experts(device: str) -> AbstractContextManager[object]:
    """A block that draws from Megatron's own random numbers for experts, if these have been initialized."""
    if device != "cuda":
        return nullcontext()
    from megatron.core.tensor_parallel import random  # type: ignore[import-not-found,unused-ignore]

    tracker = random.get_cuda_rng_tracker()
    return tracker.fork(random.get_expert_parallel_rng_tracker_name()) if tracker.is_initialized() else nullcontext()
