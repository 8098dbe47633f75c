"""What a front end tells the packages that must work with every framework and import none.

A front end (octavo-torch, octavo-jax, another's) publishes one object under the entry-point group
`octavo.frameworks`; the conformance suite, `octavo doctor` and `octavo train` reach arrays through it alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from octavo import GroupedTensorSpec, QuantizerSpec, Recipe
from octavo.formats import DType
from octavo_registry.contract.quantize import AnyBoundQuantize
from octavo_registry.contract.recording import MakeRecorder

if TYPE_CHECKING:
    import numpy as np

PLANES = (
    "rowwise",
    "rowwise_scale",
    "rowwise_global",
    "columnwise",
    "columnwise_scale",
    "columnwise_global",
)
"""Array fields that every GroupedTensor has, absent ones None: payload, decode scales, NVFP4's second level [G]."""


@dataclass(frozen=True, slots=True)
class Device:
    """One device that a framework sees: kind ("cpu", "cuda"), compute capability, a name for people."""

    kind: str
    arch: tuple[int, int] | None
    label: str


@dataclass(frozen=True, slots=True)
class LayerResult:
    """Arrays of the framework; a gradient that was not asked for is None."""

    y: Any
    dx: Any = None
    dw: Any = None
    db: Any = None


class Framework(Protocol):
    """How to reach a framework's arrays and Octavo's functions for them. Weights are [G, N, K] here, everywhere."""

    name: str

    def version(self) -> str:
        """The framework's version."""

    def devices(self) -> Sequence[Device]:
        """Devices of this process, one entry per kind and capability."""

    def from_numpy(self, array: np.ndarray, device: str = "cpu") -> Any:
        """A framework array with the same bits; ml_dtypes' bfloat16 and float8 types included."""

    def to_numpy(self, array: Any) -> np.ndarray:
        """The same bits as a numpy array."""

    def grouped_tensor(self, spec: GroupedTensorSpec, group_sizes: Any, arrays: Mapping[str, Any]) -> Any:
        """A GroupedTensor from framework arrays, named as in `PLANES`."""

    def quantize(
        self,
        x: Any,
        spec: QuantizerSpec,
        group_sizes: Any = None,
        *,
        seed: int | None = None,
        operand: str | None = None,
        group_offset: int = 0,
        scale: Any = None,
        backend: str | Sequence[str] | None = None,
    ) -> Any:
        """The front end's public `quantize`: a GroupedTensor with fields `PLANES`, `group_sizes` and `spec`."""

    def grouped_linear(
        self,
        x: Any,
        w: Any,
        group_sizes: Any,
        dy: Any = None,
        *,
        recipe: Recipe,
        bias: Any = None,
        seed: int | None = None,
        scales: Mapping[str, Any] | None = None,
        group_offset: int = 0,
        backend: str | Sequence[str] | None = None,
        compiled: bool = False,
    ) -> LayerResult:
        """The front end's public grouped linear, forward, and backward where `dy` is given.

        scales: delayed scaling's encode scales by operand, each [G]; compiled: under jit or torch.compile.
        """

    def rounding_first(self, bound: AnyBoundQuantize, spec: QuantizerSpec) -> AnyBoundQuantize:
        """A backend's quantizer of values that MXFP4 has, as one of any values, which are rounded to those first.

        Called where the backend's `BoundQuantize.round_first` does not answer.

        bound   serves `spec.held_by`, of bf16
        spec    its `mxfp4` says along which axis; results have it as their quantizer

        Rounding is `octavo_numerics.round_mxfp4`, bit for bit, on the array's device, without reading a value back.
        """

    def host_reads(self, function: Callable[..., Any], *arrays: Any) -> Sequence[str]:
        """Names of the operations by which `function(*arrays)` waits for values of an array: empty when none does."""


@runtime_checkable
class ExpertRanks(Protocol):
    """What a bridge offers besides where a MoE layer of its front end spreads its experts over processes."""

    def explain_exchange(self, recipe: Recipe, ranks: int, dtype: DType, device: str) -> Sequence[tuple[str, str]]:
        """What the layer exchanges between so many ranks by default, for tokens of `dtype` on devices of that kind,
        which need not be here: pairs of what and how.
        """


@runtime_checkable
class Recording(Protocol):
    """What a bridge offers besides where its front end has passes written down by a backend's recorder."""

    def write_down(
        self, make: MakeRecorder[Any], call: Callable[[], Any], arrays: Sequence[Any]
    ) -> tuple[Any, Callable[[Sequence[Any]], Any]]:
        """The result of `call()`, and a function of other arrays that makes the launches of the call on these and
        returns theirs.

        make     `BoundFprop.recorder`
        call     launches functions of the answer's backend alone; its result is an array that it has allocated
        arrays   those that the launches read. The others have their order, shapes and dtypes

        Raises ValueError with the reason for launches that cannot be made again.
        """


class Sharding(Protocol):
    """What a bridge offers besides where its front end spreads one call over several devices of a process."""

    def shards(self, device: str) -> int:
        """Devices of that kind in this process."""

    def sharded_linear(
        self,
        x: Any,
        w: Any,
        group_sizes: Any,
        dy: Any,
        *,
        device: str,
        recipe: Recipe,
        backend: str | Sequence[str] | None = None,
    ) -> LayerResult:
        """The front end's grouped linear of numpy arrays, forward and backward, a block of tokens on each device.

        device       their kind
        x, dy        [E, F, M, K] and [E, F, M, N] on E x F devices: E shards of experts, F of tokens
        w            [E * G, N, K]: groups cut over the experts' shards, K over the tokens' (FSDP)
        group_sizes  [E, F, G]
        """
