"""What `octavo_load` returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

from octavo import OctavoError
from octavo_registry.contract.fused import AnyBoundActQuantize, AnyBoundDactQuantize, AnyBoundNormQuantize
from octavo_registry.contract.gemm import AnyBoundDgrad, AnyBoundFprop, AnyBoundWgrad
from octavo_registry.contract.moves import AnyBoundMove, AnyBoundRouter
from octavo_registry.contract.optimizers import AnyBoundOptimizer
from octavo_registry.contract.quantize import AnyBoundDequantize, AnyBoundQuantize
from octavo_registry.contract.request import AnyRequest, GemmRequest

AnyBoundGemm: TypeAlias = AnyBoundFprop | AnyBoundDgrad | AnyBoundWgrad
AnyBoundFused: TypeAlias = AnyBoundActQuantize | AnyBoundDactQuantize | AnyBoundNormQuantize
AnyBound: TypeAlias = (
    AnyBoundGemm
    | AnyBoundQuantize
    | AnyBoundDequantize
    | AnyBoundFused
    | AnyBoundMove
    | AnyBoundRouter
    | AnyBoundOptimizer
)


class Refused(OctavoError):
    """A backend cannot serve a request that its card admits; the message is a sentence with both values."""


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """One way in which a backend could compute a GEMM, and what its model expects of it.

    name          of the kernel or tile, for people
    tiles         output tiles that are computed, partly filled ones included
    waves         tiles that each processor of the device computes one after another
    filled        part of the computed outputs that the result has, 0 to 1
    microseconds  expected time
    chosen        True for the one that runs
    """

    name: str
    tiles: int
    waves: float
    filled: float
    microseconds: float
    chosen: bool


class Backend(Protocol):
    """Serves what its card admits. Derive from this class: `kernels` and `refuses_everywhere` may be left out."""

    def refuses(self, request: AnyRequest) -> str | None:
        """The reason why this machine cannot serve `request`, or None; the card has admitted it already."""

    def refuses_everywhere(self, request: AnyRequest) -> str | None:
        """The reason why no machine would be served `request`, from the request alone, or None.

        Such as "K must be a multiple of 16". `octavo why --hypothetical` asks it for chips that are not here, so it
        looks at no device and at no build. `refuses` says the same and more.
        """
        return None

    def bind(self, request: AnyRequest) -> AnyBound:
        """The function that serves `request`, in the class of the request's operation; may raise `Refused`.

        What depends on the request alone is decided here, once: the function is the hot path. No tensor is at hand:
        under torch.compile and jax.jit planning happens while tensors hold no values.
        """

    def kernels(self, request: GemmRequest, rows: int) -> tuple[KernelChoice, ...] | None:
        """What the backend chooses from for a GEMM of `rows` rows in equal groups, best first: `octavo why --kernels`.

        Empty where nothing is chosen, as on devices with one kernel; None: the backend has no model of its kernels.
        """
        return None
