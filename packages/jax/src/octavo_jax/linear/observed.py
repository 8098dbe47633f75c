"""The arrays that a layer is given, beside what it wants of their placement: see `octavo_jax.layouts.observer`.

Only what quantizers and GEMMs read is observed. Residuals are the caller's own arrays, so that `jax.lax.scan` does not
stack a kernel that it has already.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

from jax import Array
from jax.sharding import PartitionSpec

from octavo.caller import Place, place_of_caller
from octavo_jax.dispatch.layer import Layer
from octavo_jax.layouts.observer import observed
from octavo_jax.linear.operands import Context, GemmOperand
from octavo_jax.sharding import specs
from octavo_jax.sharding.placement import Letter
from octavo_jax.sharding.placement_of_call import wanted_of

Some = TypeVar("Some", bound=GemmOperand | None)


class Observed(NamedTuple):
    """The arguments of one linear layer."""

    layer: Layer
    place: Place

    @classmethod
    def of(cls, layer: Layer) -> Observed:
        """Of a layer that is being traced."""
        return cls(layer, place_of_caller())

    def x(self, array: Some) -> Some:
        """Tokens [*B, M, K], or codes of them, which are where they were made."""
        return self._rows(self.layer.options.called.x, array, "i")

    def dy(self, array: Some) -> Some:
        """The gradient of y [*B, M, N]."""
        return self._rows("the gradient of y", array, "o")

    def kernel(self, array: Some) -> Some:
        """With the caller's axes, [E * G, ...], or codes."""
        placement = self.layer.placement
        spec = specs.WHOLE if placement is None else specs.kernel(placement, self.layer.request.weight)
        return self._seen(self.layer.options.called.kernel, array, spec)

    def bias(self, array: Some) -> Some:
        """[E * G, N], or None."""
        placement = self.layer.placement
        spec = specs.WHOLE if placement is None else specs.groups(placement, columns="o")
        return self._seen(self.layer.options.called.bias, array, spec)

    def per_row(self, name: str, array: Some) -> Some:
        """What each row has one of, [*B, M], or None."""
        placement = self.layer.placement
        spec = specs.WHOLE if placement is None else specs.per_row(placement)
        return self._seen(name, array, spec)

    def context(self, context: Context) -> Context:
        """With the group sizes [*B, G]."""
        placement = self.layer.placement
        spec = specs.WHOLE if placement is None else specs.sizes(placement)
        return context._replace(group_sizes=self._seen("group_sizes", context.group_sizes, spec))

    def whole(self, name: str, array: Some) -> Some:
        """What is the same on every device, or None."""
        return self._seen(name, array, specs.WHOLE)

    def _rows(self, name: str, array: Some, column: Letter) -> Some:
        placement = self.layer.placement
        return self._seen(name, array, specs.WHOLE if placement is None else specs.rows(placement, column))

    def _seen(self, name: str, array: Some, spec: PartitionSpec) -> Some:
        if not isinstance(array, Array):
            return array
        wanted = wanted_of(self.layer.options.called, self.layer.placement, name, array, spec, self.place)
        return array if wanted is None else observed(array, wanted)  # type: ignore[return-value]
