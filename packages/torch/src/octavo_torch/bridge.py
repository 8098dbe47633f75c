"""BRIDGE: torch's arrays and octavo_torch's functions, for packages that import no framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
from torch import Tensor

from octavo import DelayedScaling, GroupedTensorSpec, QuantizerSpec, Recipe
from octavo.formats import DType
from octavo_registry.contract.frameworks import Device, LayerResult
from octavo_registry.contract.quantize import BoundQuantize
from octavo_registry.contract.recording import MakeRecorder
from octavo_torch.arrays import sizes
from octavo_torch.arrays.dtypes import DTYPES
from octavo_torch.arrays.grouped_tensor import GroupedTensor
from octavo_torch.arrays.sizes import GroupSizes
from octavo_torch.compiler import graphs
from octavo_torch.compiler.host_reads import watch_host_reads
from octavo_torch.compiler.tracing import register_constants
from octavo_torch.dispatch.rounded import rounding_first
from octavo_torch.linear import functional
from octavo_torch.moe.parallel.explain import explain_exchange
from octavo_torch.quantizers.functional import quantize
from octavo_torch.recording.recorded_pass import RecordedPass
from octavo_torch.recording.tape import Tape
from octavo_torch.scaling.delayed_state import OPERANDS, DelayedState

if TYPE_CHECKING:
    import numpy as np

R = TypeVar("R")

# numpy has no such types: arrays of ml_dtypes cross as integers of the same width
_BY_NAME: dict[str, tuple[torch.dtype, str]] = {
    "bfloat16": (torch.bfloat16, "int16"),
    "float8_e4m3fn": (torch.float8_e4m3fn, "uint8"),
    "float8_e5m2": (torch.float8_e5m2, "uint8"),
    "float8_e8m0fnu": (torch.uint8, "uint8"),
}


class TorchFramework:
    """octavo_registry.contract.frameworks.Framework for torch. Converting arrays needs numpy and ml_dtypes."""

    name = "torch"

    def version(self) -> str:
        """torch's version."""
        return str(torch.__version__)

    def devices(self) -> Sequence[Device]:
        """The CPU, and one row for each kind of CUDA device."""
        devices = {("cpu", None): Device("cpu", None, "CPU")}
        if torch.cuda.is_available():
            for index in range(torch.cuda.device_count()):
                arch = torch.cuda.get_device_capability(index)
                devices.setdefault(("cuda", arch), Device("cuda", arch, torch.cuda.get_device_name(index)))  # type: ignore[arg-type]
        return list(devices.values())

    def from_numpy(self, array: np.ndarray, device: str = "cpu") -> Tensor:
        """A tensor with the same bits; types of ml_dtypes are accepted."""
        import numpy as np

        # a copy: torch would share the memory, and warn where numpy declares it read-only
        array = np.array(array, order="C")
        converted = _BY_NAME.get(array.dtype.name)
        if converted is None:
            return torch.from_numpy(array).to(device)
        dtype, carrier = converted
        return torch.from_numpy(array.view(carrier)).view(dtype).to(device)

    def to_numpy(self, array: Tensor) -> np.ndarray:
        """An array with the same bits; bfloat16 and float8 become types of ml_dtypes."""
        import ml_dtypes
        import numpy as np

        host = array.detach().contiguous().cpu()
        for name, (dtype, carrier) in _BY_NAME.items():
            if host.dtype is dtype and dtype is not torch.uint8:
                raw = host.view(getattr(torch, carrier)).numpy()
                return np.ascontiguousarray(raw).view(np.dtype(getattr(ml_dtypes, name)))
        return np.ascontiguousarray(host.numpy())

    def grouped_tensor(
        self, spec: GroupedTensorSpec, group_sizes: object, arrays: Mapping[str, Tensor | None]
    ) -> GroupedTensor:
        """A GroupedTensor of these planes."""
        rows = spec.shape[0]
        planes = {name: value for name, value in arrays.items() if value is not None}
        if spec.ragged_axis is None:
            return GroupedTensor(spec, None, **planes)
        like = next(iter(planes.values()))
        checked, _ = sizes.as_sizes([rows] if group_sizes is None else group_sizes, rows, spec.groups, like)
        return GroupedTensor(spec, checked.to(like.device, torch.int64), **planes)

    def quantize(
        self,
        x: Tensor,
        spec: QuantizerSpec,
        group_sizes: GroupSizes | None = None,
        *,
        seed: int | None = None,
        operand: str | None = None,
        group_offset: int = 0,
        scale: Tensor | None = None,
        backend: str | Sequence[str] | None = None,
    ) -> GroupedTensor:
        """octavo_torch.quantize."""
        return quantize(
            x,
            spec,
            group_sizes,
            seed=seed,
            operand=operand,
            group_offset=group_offset,
            scale=scale,
            backend=backend,
        )

    def grouped_linear(
        self,
        x: Tensor,
        w: Tensor,
        group_sizes: GroupSizes | None,
        dy: Tensor | None = None,
        *,
        recipe: Recipe,
        bias: Tensor | None = None,
        seed: int | None = None,
        scales: Mapping[str, Tensor] | None = None,
        group_offset: int = 0,
        backend: str | Sequence[str] | None = None,
        compiled: bool = False,
    ) -> LayerResult:
        """octavo_torch.grouped_linear, with gradients of x, w and bias where `dy` is given."""
        state = None
        if isinstance(recipe, DelayedScaling):
            state = _state_of(recipe, scales or {}, w)
        leaves = [value if value is None else value.detach().requires_grad_(dy is not None) for value in (x, w, bias)]

        def layer(x: Tensor, w: Tensor, sizes: GroupSizes | None, bias: Tensor | None) -> Tensor:
            return functional.grouped_linear(
                x,
                w,
                sizes,
                recipe=recipe,
                bias=bias,
                seed=seed,
                state=state,
                group_offset=group_offset,
                backend=backend,
            )

        register_constants()
        call: Callable[..., Tensor] = torch.compile(layer, fullgraph=True) if compiled else layer
        y = call(leaves[0], leaves[1], group_sizes, leaves[2])
        if dy is None:
            return LayerResult(y)
        torch.autograd.backward(y, dy)
        grads = [None if leaf is None else leaf.grad for leaf in leaves]
        return LayerResult(y.detach(), *grads)

    def rounding_first(
        self, bound: BoundQuantize[Tensor, GroupedTensor], spec: QuantizerSpec
    ) -> BoundQuantize[Tensor, GroupedTensor]:
        """A quantizer of weights by `spec`, over a backend's by `spec.held_by`."""
        return rounding_first(bound, spec)

    def explain_exchange(self, recipe: Recipe, ranks: int, dtype: DType, device: str) -> Sequence[tuple[str, str]]:
        """octavo_torch.explain_exchange, as pairs."""
        plan = explain_exchange(recipe, ranks, dtype=DTYPES[dtype], device=device)
        return [("route", f"{plan.route}: {plan.reason}"), *plan.lines]

    def host_reads(self, function: Callable[..., object], *arrays: Tensor) -> Sequence[str]:
        """Operations by which `function(*arrays)` waits for a tensor's values on the host.

        Every tensor is treated as if it were on an accelerator, so reads of CPU tensors are reported, too.
        """
        with watch_host_reads() as reads:
            function(*arrays)
        return reads

    def capture(self, function: Callable[..., R], *arrays: Tensor) -> Callable[..., R]:
        """`function(*arrays)` as a CUDA graph: called with tensors like these, it replays and returns the results.

        The results are the graph's own tensors, which the next replay overwrites. octavo_torch_cudagraph.capture does
        the same and checks its arguments.
        """
        inputs = [array.detach().clone() for array in arrays]
        graph, results = graphs.record(lambda: function(*inputs), inputs[0].device)
        return _Replay(graph, inputs, results, function)

    def write_down(
        self, make: MakeRecorder[Tensor], call: Callable[[], Tensor], arrays: Sequence[Tensor]
    ) -> tuple[Tensor, Callable[[Sequence[Tensor]], Tensor | None]]:
        """octavo_registry.contract.frameworks.Recording's, by what a MoE layer's passes are written down with."""
        with Tape(make, arrays[0], arrays) as tape:
            result = call()
        written = RecordedPass(tape, arrays, [result])
        return result, lambda others: written.run(others, others[0])[0]


@dataclass(frozen=True, slots=True)
class _Replay(Generic[R]):
    """A captured call. It keeps `function` alive, because a replay reads the tensors that this closes over."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    results: R
    function: Callable[..., R]

    def __call__(self, *arrays: Tensor) -> R:
        for target, value in zip(self.inputs, arrays, strict=True):
            target.copy_(value)
        self.graph.replay()
        return self.results


def _state_of(recipe: DelayedScaling, scales: Mapping[str, Tensor], w: Tensor) -> DelayedState:
    state = DelayedState.create(recipe, w.shape[0], w.device)
    for index, operand in enumerate(OPERANDS):
        if operand in scales:
            state.scale[index].copy_(scales[operand])
    return state


BRIDGE = TorchFramework()

__all__ = ["BRIDGE", "TorchFramework"]
