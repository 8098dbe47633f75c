"""A grouped linear layer as one call each way, for backends whose launches cost less than the Python around them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

from octavo.quantizer import Operand
from octavo.recipe_base import Gemm
from octavo_registry.contract.arrays import A, A_co
from octavo_registry.contract.plan import Plan
from octavo_registry.contract.request import GemmRequest, QuantizeRequest

State_contra = TypeVar("State_contra", contravariant=True)


class DelayedScales(Protocol[A_co]):
    """What the passes read and write of delayed scaling's state, by operand in the order x, w, dy."""

    @property
    def history(self) -> A_co:
        """fp32 [3, slots, G]; slot 0 collects the amax of the step."""

    @property
    def scale(self) -> A_co:
        """fp32 [3, G], encode scales."""


class WholeLayer(Protocol[A, State_contra]):
    """A layer's two passes, bit for bit those of its plans one after the other.

    For eager calls on plain arrays with nothing but x, a weight that lies as [G, N, K], sizes, a bias, a seed and a
    state; the front end composes others of the plans. `State` is the front end's, with the arrays of `DelayedScales`.

    keeps_x, keeps_w   whether backward reads the unquantized operand
    """

    @property
    def keeps_x(self) -> bool: ...

    @property
    def keeps_w(self) -> bool: ...

    def takes(self, x: A, w: A, bias: A | None, state: State_contra | None, /) -> bool:
        """Whether the arrays lie in memory as the passes read them; a call whose arrays do not is composed."""

    def forward(
        self,
        x: A,
        w: A,
        sizes: A,
        bias: A | None,
        seed: A | int | None,
        state: State_contra | None,
        record: bool,
        group_offset: int,
        /,
    ) -> tuple[A, A | None, Any]:
        """y, the codes that backward reads (None: it reads none), and what else backward is given, as it is.

        sizes   int [G], checked where they are in host memory; they may change before backward
        record  the amax of x, of w, and in backward of dy go into the state
        """

    def backward(
        self,
        dy: A,
        x: A | None,
        w: A | None,
        codes: A | None,
        rest: Any,
        wanted: tuple[bool, bool],
        seed: A | int | None,
        /,
    ) -> tuple[A | None, A | None]:
        """dx and dw, each where it is wanted.

        dy           [M, N], in the dtype of y
        x, w         where `keeps_x` and `keeps_w` say so
        codes, rest  what `forward` returned beside y; the state and group_offset of the call are in `rest`
        """

    def sizes(self, rest: Any, /) -> A:
        """The sizes of the call, int64 [G], cut to the rows."""


class MakeWholeLayer(Protocol):
    """Makes of the plans of a layer its two passes."""

    def __call__(
        self, gemms: Mapping[Gemm, Plan[GemmRequest, Any]], quantizers: Mapping[Operand, Plan[QuantizeRequest, Any]], /
    ) -> WholeLayer[Any, Any] | None:
        """The passes of exactly these plans, all of them of this backend; None where it has none for them."""
