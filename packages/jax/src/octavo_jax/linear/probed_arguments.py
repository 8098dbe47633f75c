"""The arrays that a layer is given, with probes that report where one is not placed as the layer reads it.

See `octavo_jax.array_moves.probe`. Only what quantizers and GEMMs read has a probe. Residuals are the caller's own
arrays, so that `jax.lax.scan` does not stack a kernel that it has already.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

from jax import Array
from jax.sharding import PartitionSpec

from octavo.caller import Place, place_of_caller
from octavo_jax.array_moves.probe import probed
from octavo_jax.arrays.gemm_operands import GemmOperand
from octavo_jax.dispatch.layer import Layer
from octavo_jax.linear.operands import Context
from octavo_jax.sharding import specs
from octavo_jax.sharding.placement import Letter
from octavo_jax.sharding.placement_of_call import wanted_placement

Some = TypeVar("Some", bound=GemmOperand | None)


class ProbedArguments(NamedTuple):
    """Adds a probe to each argument of one linear layer; `place` is the line of the caller, for messages."""

    layer: Layer
    place: Place

    @classmethod
    def of(cls, layer: Layer) -> ProbedArguments:
        """For a layer that is being traced."""
        return cls(layer, place_of_caller())

    def x(self, array: Some) -> Some:
        """Tokens [*B, M, K]; codes of them have no probe, because they lie where they were made."""
        return self._rows(self.layer.options.called.x, array, "i")

    def dy(self, array: Some) -> Some:
        """The gradient of y [*B, M, N]."""
        return self._rows("the gradient of y", array, "o")

    def kernel(self, array: Some) -> Some:
        """The kernel with the caller's axes, [E * G, ...]; codes of it have no probe."""
        placement = self.layer.placement
        spec = specs.WHOLE if placement is None else specs.kernel(placement, self.layer.request.weight)
        return self._probed(self.layer.options.called.kernel, array, spec)

    def bias(self, array: Some) -> Some:
        """The bias [E * G, N], or None."""
        placement = self.layer.placement
        spec = specs.WHOLE if placement is None else specs.groups(placement, columns="o")
        return self._probed(self.layer.options.called.bias, array, spec)

    def per_row(self, name: str, array: Some) -> Some:
        """An array with one value for each row, [*B, M], or None."""
        placement = self.layer.placement
        spec = specs.WHOLE if placement is None else specs.per_row(placement)
        return self._probed(name, array, spec)

    def context(self, context: Context) -> Context:
        """The context, whose group sizes [*B, G] get a probe."""
        placement = self.layer.placement
        spec = specs.WHOLE if placement is None else specs.sizes(placement)
        return context._replace(group_sizes=self._probed("group_sizes", context.group_sizes, spec))

    def whole(self, name: str, array: Some) -> Some:
        """An array that is the same on every device, or None."""
        return self._probed(name, array, specs.WHOLE)

    def _rows(self, name: str, array: Some, column: Letter) -> Some:
        placement = self.layer.placement
        return self._probed(name, array, specs.WHOLE if placement is None else specs.rows(placement, column))

    def _probed(self, name: str, array: Some, spec: PartitionSpec) -> Some:
        if not isinstance(array, Array):
            return array
        wanted = wanted_placement(self.layer.options.called, self.layer.placement, name, array, spec, self.place)
        return array if wanted is None else probed(array, wanted)  # type: ignore[return-value]
