"""Tensor parallelism of grouped layers: styles for torch.distributed.tensor.parallel.parallelize_module.

A rank has a part of each group's matrix and quantizes that part by itself: its scales are those of a layer of that
size. Rows, group sizes and probabilities are the same on every rank of the group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from octavo_registry.contract.cards import GATED
from octavo_torch.linear.coded_weight import CodedWeight
from octavo_torch.linear.module import GroupedLinear
from octavo_torch.lora.module import GroupedLoRA
from octavo_torch.mlp.module import GroupedMLP
from octavo_torch.mlp.packed_weight import PackedWeight


class _Style(ParallelStyle):
    """Parameters sharded by name; hooks exchange the inputs' gradients and the results."""

    kind: type[nn.Module]
    shards: ClassVar[Mapping[str, int]]
    gathers_gradients = False
    adds_results = False

    def __init__(self, *, reduce: bool = True) -> None:
        """reduce: False leaves summing a result over the ranks to the caller."""
        super().__init__()
        self.reduce = reduce

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, self.kind):
            raise ValueError(
                f"the module is a {type(module).__name__}; {type(self).__name__} is for {self.kind.__name__}"
            )
        self.check(module, device_mesh.size())
        for name, parameter in [*module._parameters.items()]:
            if parameter is None:
                continue
            if name not in self.shards and not name.startswith("bias"):
                raise ValueError(f"{name} is one of several weights; create the layer without per_group_parameters")
            placement: Placement = Shard(self.shards[name]) if name in self.shards else Replicate()
            sharded = distribute_tensor(parameter.detach(), device_mesh, [placement])
            module._parameters[name] = nn.Parameter(sharded, parameter.requires_grad)
        if self.gathers_gradients:
            module.register_forward_pre_hook(_SumInputGradients(device_mesh), with_kwargs=True)
        if self.adds_results and self.reduce:
            module.register_forward_hook(_SumResults(device_mesh))
        return module

    def check(self, module: nn.Module, ranks: int) -> None:
        """Raises ValueError where `module` cannot be split among `ranks`."""
        if any(isinstance(child, GroupedLoRA) for child in module.children()):
            raise ValueError(
                f"the {type(module).__name__} has adapters, which add to whole products and are not split; end them by "
                "merge_lora before it is split, or shard it with FSDP2"
            )
        for option in ("main_grad", "delayed_wgrad"):
            if getattr(module, option) is not None:
                raise ValueError(
                    f"the {type(module).__name__} has {option.replace('delayed', 'delay')}, and the gradient of a "
                    "rank's part of a weight goes through autograd to the DTensor that is split; create the layer "
                    "without it"
                )
        for name, dim in self.shards.items():
            parameter = module._parameters.get(name)
            if isinstance(parameter, CodedWeight | PackedWeight):
                raise ValueError(
                    f"{name} is codes alone, which are not split; create the layer with values, whose parts ranks "
                    "quantize"
                )
            if parameter is not None and parameter.shape[dim] % ranks:
                raise ValueError(
                    f"{name} has shape {list(parameter.shape)} and dim {dim} is split among {ranks} ranks; "
                    "give features that the ranks divide"
                )


class GroupedColumnParallel(_Style):
    """A GroupedLinear whose out-features are split: y is this rank's [M, N / ranks]; gradients of x are summed.

    Do not use it before a gated activation: the two halves of the features are split as one axis, so a rank would get
    one half; use GroupedMLPParallel there.
    """

    kind = GroupedLinear
    shards: ClassVar[Mapping[str, int]] = {"weight": 1, "bias": 1}
    gathers_gradients = True


class GroupedRowParallel(_Style):
    """A GroupedLinear whose in-features are split: x is this rank's [M, K / ranks], y the sum over the ranks."""

    kind = GroupedLinear
    shards: ClassVar[Mapping[str, int]] = {"weight": 2}
    adds_results = True


class GroupedMLPParallel(_Style):
    """A GroupedMLP whose hidden features are split: x and y are whole.

    A gated MLP needs `interleave`, so that each rank gets the same blocks of the gate and of the up projection.
    """

    kind = GroupedMLP
    shards: ClassVar[Mapping[str, int]] = {"weight1": 1, "bias1": 1, "weight2": 2}
    gathers_gradients = adds_results = True

    def check(self, module: nn.Module, ranks: int) -> None:
        """As for every style; a gated MLP also needs whole blocks per rank."""
        super().check(module, ranks)
        assert isinstance(module, GroupedMLP)  # `kind`
        if module.activation not in GATED:
            return
        block = module.interleave
        if block is None:
            raise ValueError(
                f"{module.activation} reads a gate and an up projection, whose halves would go to different ranks; "
                "create the GroupedMLP with interleave=, which alternates both in blocks"
            )
        if module.hidden_features % (block * ranks):
            raise ValueError(
                f"hidden_features is {module.hidden_features} in blocks of {block} for {ranks} ranks; "
                f"give a multiple of {block * ranks}"
            )


class _SumInputGradients:
    """A forward pre-hook: inputs are whole on each rank, and their gradients are summed over the ranks."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def __call__(
        self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """The arguments, with gradients that are summed over the ranks."""
        return tuple(map(self._summed, args)), {name: self._summed(value) for name, value in kwargs.items()}

    def _summed(self, value: object) -> object:
        if not isinstance(value, Tensor) or not value.requires_grad:
            return value
        replicated = DTensor.from_local(value, self.mesh, [Replicate()], run_check=False)
        return replicated.to_local(grad_placements=[Partial()])


class _SumResults:
    """A forward hook: the sum of the ranks' results."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def __call__(self, module: nn.Module, args: object, result: Tensor) -> Tensor:
        """The sum, on every rank."""
        part = DTensor.from_local(result, self.mesh, [Partial()], run_check=False)
        return part.redistribute(placements=[Replicate()]).to_local()


__all__ = ["GroupedColumnParallel", "GroupedMLPParallel", "GroupedRowParallel"]
