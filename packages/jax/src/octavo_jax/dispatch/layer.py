"""What one linear layer runs: the registry's plan, which is chosen when the layer is traced, and remembered."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

import octavo_jax.dispatch.preference  # noqa: F401 (a preference is part of what JAX's caches are keyed by)
import octavo_registry
from octavo import HighPrecision, Recipe
from octavo.formats import DType
from octavo.grouped_tensor import PLAIN
from octavo.quantizer import Direction, Operand
from octavo.recipe_base import Gemm
from octavo_jax.array_moves.moves import CalledFunction
from octavo_jax.arrays.checks import check_fixed_axes, check_text
from octavo_jax.arrays.dtypes import dtype_name
from octavo_jax.dispatch.backends import BackendNames, hashable
from octavo_jax.dispatch.device import DeviceKind, device_of, multiprocessors_of
from octavo_jax.dispatch.room import Room, check_room, plan_with_room
from octavo_jax.memo import Interned, Memo
from octavo_jax.sharding.placement import Placement
from octavo_registry import GemmRequest, LayerPlan, QuantizePlan, QuantizeRequest, Weight
from octavo_registry.contract.bound import Bound
from octavo_registry.contract.plan import Plan
from octavo_registry.contract.weights import readers

Some = TypeVar("Some", bound=Bound[Any])

HIGH_PRECISION = HighPrecision()
A_LAYER = CalledFunction("a layer")


class LayerOptions(NamedTuple):
    """The arguments of a layer that are not arrays; hashable.

    preferred_element_type   dtype of y; None: the recipe's output_dtype, else x's
    checkpoint_name          of quantized operands; None names nothing
    output_checkpoint_name   of y
    called                   what messages call the layer and its arguments
    room                     multiprocessors that the GEMMs leave unused; None: they use all
    """

    recipe: Recipe
    preferred_element_type: DTypeLike | None
    checkpoint_name: str | None
    output_checkpoint_name: str | None
    backend: str | tuple[str, ...] | None
    called: CalledFunction
    room: Room | None

    @classmethod
    def of(
        cls,
        recipe: Recipe | None,
        preferred_element_type: DTypeLike | None = None,
        checkpoint_name: str | None = None,
        output_checkpoint_name: str | None = None,
        backend: BackendNames = None,
        called: CalledFunction = A_LAYER,
        room: Room | None = None,
    ) -> LayerOptions:
        """The options that the arguments of a public function give; ValueError for a bad name or a bad Room."""
        check_text("checkpoint_name", checkpoint_name)
        check_text("output_checkpoint_name", output_checkpoint_name)
        names = checkpoint_name, output_checkpoint_name
        recipe = HIGH_PRECISION if recipe is None else recipe
        return cls(recipe, preferred_element_type, *names, hashable(backend), called, check_room(room))


class LayerRequest(NamedTuple):
    """Everything that a layer's plan depends on.

    dtype, kernel_dtype  the dtypes of x and of the kernel
    shape                the kernel's
    weight               the kernel's axes: "kn" for [G, K, N], "nk" for [G, N, K]
    training             whether the GEMMs of the gradients are planned, too
    placement            of blocks and shards; None: rows [M, K] and a kernel on one device
    multiprocessors      of the device, where the options leave some; else None
    """

    options: LayerOptions
    dtype: Any
    kernel_dtype: Any
    shape: tuple[int, ...]
    weight: Weight
    device: DeviceKind
    training: bool
    placement: Placement | None
    multiprocessors: int | None


@dataclass(frozen=True, eq=False)
class Layer:
    """What one linear layer runs. Compared by identity, so that it is a cheap static argument of `jax.jit`.

    plan            the registry's plan
    request         what the layer was planned for
    y_dtype         dtype of the result. If that is summed over shards, the plan's GEMM returns float32
    product_dtype   dtype in which a GEMM multiplies operands that it takes unquantized, dy among them: that of x and
                    the kernel, or fp32 if these differ
    """

    plan: LayerPlan
    request: LayerRequest
    y_dtype: Any
    product_dtype: Any

    @property
    def options(self) -> LayerOptions:
        """The caller's arguments that are not arrays."""
        return self.request.options

    @property
    def x_dtype(self) -> Any:
        """Of x and of its gradient."""
        return self.request.dtype

    @property
    def kernel_dtype(self) -> Any:
        """Of the kernel and of its gradient."""
        return self.request.kernel_dtype

    @property
    def placement(self) -> Placement | None:
        """Of blocks and shards; None: rows [M, K] and a kernel on one device."""
        return self.request.placement

    def quantizer(self, operand: Operand) -> QuantizePlan | None:
        """The quantizer of an operand; None if no GEMM reads it quantized."""
        return dict(self.plan.quantizers)[f"quantize_{operand}"]

    def for_training(self) -> Layer:
        """This layer with the GEMMs of its gradients planned; itself if they are. Raises as `layer_for` does."""
        return self if self.request.training else _plan_layer(self.request._replace(training=True))

    def quantizing(self, x: Collection[Gemm], w: Collection[Gemm]) -> Layer:
        """This layer, quantizing only the planes of x and of the kernel that these GEMMs read.

        Two such layers, one for each pass, quantize an operand twice, so that no codes are kept in between. With
        delayed scaling an operand is quantized even if none of these GEMMs reads it, because that records its amax.
        """
        quantizers = (
            self._quantizer_read_by(x, "x", self.plan.quantize_x),
            self._quantizer_read_by(w, "w", self.plan.quantize_w),
        )
        if quantizers == (self.plan.quantize_x, self.plan.quantize_w):
            return self
        key = self, tuple(None if plan is None else (plan.request.quantizer, plan.run) for plan in quantizers)
        plan = replace(self.plan, quantize_x=quantizers[0], quantize_w=quantizers[1])
        return _interned.of(key, lambda: replace(self, plan=plan))

    def _quantizer_read_by(
        self, gemms: Collection[Gemm], operand: Operand, plan: QuantizePlan | None
    ) -> QuantizePlan | None:
        """The operand's quantizer `plan`, with only the planes that these GEMMs read; None if they read none."""
        if plan is None:
            return None
        spec, gemm_of_plane = plan.request.quantizer, readers(operand, self.plan.fprop.request.weight)
        planes = zip(("rowwise", "columnwise"), gemm_of_plane, strict=True)
        read = [plane for plane, gemm in planes if gemm in gemms and plane in spec.directions]
        if not read:
            return plan if self.options.recipe.stateful else None
        return plan if len(read) == len(spec.directions) else self._with_plane(plan.request, read[0])

    def quantizer_of_tokens(self, operand: Operand) -> QuantizePlan:
        """The quantizer of tokens as one matrix, rowwise and in the plain layout, for a GEMM that gathers codes."""
        plan = self.quantizer(operand)
        assert plan is not None  # a GEMM reads its codes
        return self._with_plane(replace(plan.request, layouts=(PLAIN, PLAIN), stacked=True), "rowwise")

    def in_two_forms(self, plan: Plan[Any, Some]) -> Some:
        """What a quantizer's plan has bound: in two forms if its backend has them and all GEMMs are that backend's.

        On a mesh operands are codes alone, because specs say of these how they are cut and gathered.
        """
        bind_two_forms = getattr(plan.bound, "in_two_forms", None)
        reads_them = all(gemm is None or gemm.backend == plan.backend for _, gemm in self.plan.gemms)
        return bind_two_forms() if bind_two_forms is not None and reads_them and self.placement is None else plan.bound

    def _with_plane(self, request: QuantizeRequest, direction: Direction) -> QuantizePlan:
        """The plan of this request for the plane of one direction alone."""
        quantizer = request.quantizer.with_orientation(direction)
        return octavo_registry.plan(replace(request, quantizer=quantizer), backend=self.options.backend)


_planned: Memo[Layer] = Memo()
_interned: Interned[Layer] = Interned()


def layer_for(
    options: LayerOptions,
    x: Array,
    kernel: Array,
    *,
    weight: Weight = "kn",
    x_dtype: DTypeLike | None = None,
    training: bool = True,
    placement: Placement | None = None,
) -> Layer:
    """The layer for x [M, K] and kernel [G, K, N], or [G, N, K] with weight "nk". Its gradients have their dtypes.

    x_dtype   of an x that does not exist yet, such as an activation's result: then only the device of `x` counts
    training  False: only the forward pass is planned; `Layer.for_training` plans the rest when it is differentiated
    placement of blocks and shards: x is [*B, M, K], the kernel [E * G, ...], and the plans are for one block's GEMMs

    Equal arguments give the same object as long as the registry chooses the same functions, so nothing is traced twice.
    Raises NoBackendError if nothing serves the layer, OctavoError or ValueError if it cannot leave the options' room.
    """
    dtype = jnp.dtype(x.dtype if x_dtype is None else x_dtype)
    device, multiprocessors = device_of(x), None
    if options.room is not None:
        if device.kind == "cpu":
            options = options._replace(room=None)
        else:
            multiprocessors = multiprocessors_of(x)
    request = LayerRequest(
        options, dtype, kernel.dtype, kernel.shape, weight, device, training, placement, multiprocessors
    )
    recipe = options.recipe
    key = (id(recipe), options[1:], request[1:])  # the hash of a recipe takes 2 microseconds
    return _planned.get(key, lambda: _plan_layer(request), recipe)


class _Dtypes(NamedTuple):
    """The dtypes of a layer.

    x, kernel     of these arrays
    out           of the layer's result
    product       in which GEMMs multiply what they take unquantized
    y, dx, dw     of what the GEMMs return: float32 if that is summed over shards
    """

    x: DType
    kernel: DType
    out: DType
    product: DType
    y: DType
    dx: DType
    dw: DType

    @classmethod
    def of(cls, layer: LayerRequest) -> _Dtypes:
        x, kernel = dtype_name(layer.dtype, "x"), dtype_name(layer.kernel_dtype, "kernel")
        recipe, preferred, placement = layer.options.recipe, layer.options.preferred_element_type, layer.placement
        named = None if preferred is None else dtype_name(preferred, "preferred_element_type")
        out = named or recipe.output_dtype or x
        dtypes = cls(x, kernel, out, x if x == kernel else "float32", out, x, recipe.wgrad_dtype or kernel)
        if placement is None:
            return dtypes
        return dtypes._replace(
            y="float32" if placement.is_summed_over("i") else dtypes.y,
            dx="float32" if placement.is_summed_over("o") else dtypes.dx,
            dw="float32" if placement.sums_data_blocks else dtypes.dw,
        )


def _gemm_sizes(layer: LayerRequest) -> tuple[int, int, int]:
    """G, K and N of the GEMMs that one device runs."""
    groups, k, n = layer.shape if layer.weight == "kn" else (layer.shape[0], layer.shape[2], layer.shape[1])
    placement = layer.placement
    if placement is None:
        return groups, k, n
    groups = placement.gemm_size("g", groups) // placement.block_count("e")
    return groups, placement.gemm_size("k", k), placement.gemm_size("n", n)


def _plan_layer(layer: LayerRequest) -> Layer:
    options, recipe, dtypes = layer.options, layer.options.recipe, _Dtypes.of(layer)
    check_fixed_axes(options.called.kernel, layer.shape)
    groups, k, n = _gemm_sizes(layer)
    kind, arch = layer.device
    fprop = GemmRequest(
        op="fprop",
        framework="jax",
        device=kind,
        in_dtype=dtypes.x,
        out_dtype=dtypes.y,
        recipe=recipe,
        arch=arch,
        k=k,
        n=n,
        groups=groups,
        training=layer.training,
        weight=layer.weight,
    )
    plan = octavo_registry.plan_layer(
        fprop,
        backend=options.backend,
        wgrad_dtype=dtypes.dw,
        dgrad_dtype=dtypes.dx,
        w_dtype=dtypes.kernel,
        product_dtype=dtypes.product,
    )
    key = (recipe.fingerprint, options[1:], layer[1:], tuple(each.run for each in plan.plans))
    if options.room is not None and layer.multiprocessors is not None:
        plan = plan_with_room(plan, options.room, layer.multiprocessors, f"the {kind} device")
    return _interned.of(key, lambda: Layer(plan, layer, jnp.dtype(dtypes.out), jnp.dtype(dtypes.product)))
