"""Quantizers of a layer's operands as pytrees.

Every field survives flatten, tree.map, vmap, scan, copies, pickle and orbax, because a field is declared static or an
array once and nothing is validated when a tree is put together; JSON holds everything but arrays.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import jax
from jax import Array

from octavo import DelayedScaling, HighPrecision, QuantizerSpec
from octavo.quantizer import DEFAULT_CHECKPOINT_NAME
from octavo_jax.arrays.exportable import exportable, in_json
from octavo_jax.arrays.grouped_tensor import GroupedTensor
from octavo_jax.arrays.recipes import RecipeLike, as_recipe
from octavo_jax.arrays.sizes import GroupSizes
from octavo_jax.dispatch.backends import BackendNames
from octavo_jax.quantizers import saving
from octavo_jax.quantizers.functional import quantize
from octavo_jax.scaling.delayed_state import DelayedState, ScalingHistory, init_delayed


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantizer:
    """How one operand is quantized, and its history where the recipe keeps one.

    spec    static: format, scaling, planes, checkpoint name
    state   leaves of delayed scaling, else None
    """

    spec: QuantizerSpec = field(metadata={"static": True})
    state: ScalingHistory | None = None

    def __call__(
        self,
        x: Array,
        group_sizes: GroupSizes | None = None,
        *,
        seed: int | Array | None = None,
        group_offset: int | Array = 0,
        backend: BackendNames = None,
    ) -> GroupedTensor:
        """`octavo_jax.quantize` with this spec and scale."""
        scale = None if self.state is None else self.state.scale
        return quantize(x, self.spec, group_sizes, seed=seed, group_offset=group_offset, scale=scale, backend=backend)

    def to_json(self) -> str:
        """Canonical JSON of everything but arrays; `arrays` gives those."""
        return saving.to_json(self._saved())

    def arrays(self, prefix: str = "") -> dict[str, Array]:
        """The state's arrays by name, "history" and "scale", for safetensors or npz; {} where there is no state."""
        return saving.state_arrays(self.state, prefix)

    @classmethod
    def from_json(cls, text: str | bytes, arrays: saving.Arrays | None = None) -> Quantizer:
        """The quantizer that `to_json` of this or an earlier release wrote; ValueError for anything else.

        arrays   what `arrays()` gave. None: a state's leaves are `jax.ShapeDtypeStruct`, which orbax restores into
        """
        restored_set = cls._restored(saving.read(text, "quantizer"), arrays, "")
        saving.check_names(arrays, restored_set.arrays())
        return restored_set

    def _saved(self) -> saving.SavedQuantizer:
        return saving.SavedQuantizer(spec=self.spec, state=saving.saved_state(self.state))

    @classmethod
    def _restored(cls, saved: saving.SavedQuantizer, arrays: saving.Arrays | None, prefix: str) -> Quantizer:
        return cls(saved.spec, saving.restored_state(saved.state, arrays, prefix))


exportable(Quantizer, *in_json(QuantizerSpec))


@exportable
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizerSet:
    """Quantizers of x, of the kernel as [G, N, K], and of dy; None where no GEMM reads that operand quantized."""

    x: Quantizer | None
    kernel: Quantizer | None
    grad: Quantizer | None

    def to_json(self) -> str:
        """Canonical JSON of everything but arrays; `arrays` gives those."""
        x, kernel, grad = (None if one is None else one._saved() for one in (self.x, self.kernel, self.grad))
        return saving.to_json(saving.SavedSet(x=x, kernel=kernel, grad=grad))

    def arrays(self) -> dict[str, Array]:
        """The states' arrays by name, "x.history" to "grad.scale", for safetensors or npz."""
        return {
            name: array
            for operand, one in vars(self).items()
            if one is not None
            for name, array in one.arrays(f"{operand}.").items()
        }

    @classmethod
    def from_json(cls, text: str | bytes, arrays: saving.Arrays | None = None) -> QuantizerSet:
        """The set that `to_json` of this or an earlier release wrote; `arrays` as in `Quantizer.from_json`."""
        saved = saving.read(text, "quantizer_set")

        def restored(one: saving.SavedQuantizer | None, operand: str) -> Quantizer | None:
            return None if one is None else Quantizer._restored(one, arrays, f"{operand}.")

        restored_set = cls(restored(saved.x, "x"), restored(saved.kernel, "kernel"), restored(saved.grad, "grad"))
        saving.check_names(arrays, restored_set.arrays())
        return restored_set


def quantizer_set(
    recipe: RecipeLike, *, groups: int | None = None, checkpoint_name: str | None = DEFAULT_CHECKPOINT_NAME
) -> QuantizerSet:
    """The quantizers of `recipe`'s operands.

    groups            needed by delayed scaling, whose fresh state has one column per group
    checkpoint_name   what each quantizer names its outputs; None: nothing
    """
    recipe = as_recipe(recipe) or HighPrecision()
    histories: tuple[ScalingHistory | None, ...] = (None, None, None)
    if isinstance(recipe, DelayedScaling):
        if groups is None:
            raise ValueError(
                f"groups is None and the recipe {recipe.kind!r} keeps a state per group; give their number"
            )
        state = init_delayed(recipe, groups)
        histories = (state.x, state.kernel, state.grad)

    specs = [recipe.quantizer(operand, checkpoint_name=checkpoint_name) for operand in ("x", "w", "dy")]
    return QuantizerSet(
        *(None if spec is None else Quantizer(spec, history) for spec, history in zip(specs, histories, strict=True))
    )


def with_state(quantizers: QuantizerSet, state: DelayedState) -> QuantizerSet:
    """The same quantizers with the histories and scales of `state`."""

    def renewed(quantizer: Quantizer | None, history: ScalingHistory) -> Quantizer | None:
        return None if quantizer is None else replace(quantizer, state=history)

    return QuantizerSet(
        renewed(quantizers.x, state.x),
        renewed(quantizers.kernel, state.kernel),
        renewed(quantizers.grad, state.grad),
    )
