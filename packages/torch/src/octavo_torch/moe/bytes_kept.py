"""bytes_kept: what a MoE layer keeps between forward and backward, to the byte, before anything has run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from octavo import Recipe
from octavo.quantizer import Operand
from octavo.renamed import renamed_fields
from octavo_registry.contract.cards import GATED, Activation
from octavo_torch.arrays.checks import backend_names, brief, check_count, check_device, check_dtype, check_flag
from octavo_torch.arrays.grouped_tensor import PLANES_OF, GroupedTensor
from octavo_torch.dispatch.layer import Layer
from octavo_torch.dispatch.recipes import recipe_of
from octavo_torch.functions.activations import check_activation
from octavo_torch.mlp.plan import RequiredGradients, mlp_plan_for
from octavo_torch.moe.forms import Form, WeightCodes, check_form, check_weight_codes, rows_plan
from octavo_torch.moe.plan import MoePlan, moe_plan_for

_BLOCK = 512  # to which torch's CUDA allocator rounds an allocation up


@renamed_fields(choices="k")
@dataclass(frozen=True)
class MoeShape:
    """The sizes of a MoE layer.

    tokens, k                                      T, and the choices of each token
    experts                                        G
    in_features, hidden_features, out_features     K, F and N; None for in_features
    """

    tokens: int
    k: int
    experts: int
    in_features: int
    hidden_features: int
    out_features: int | None = None

    @property
    def choices(self) -> int:
        """k, by its old name."""
        return self.k

    def check(self) -> None:
        """ValueError unless every size is a count."""
        for name, value in vars(self).items():
            if name != "out_features" or value is not None:
                check_count(name, value)


@dataclass(frozen=True)
class KeptBytes:
    """Bytes of each tensor that a MoE layer keeps for its backward; parameters are not among them.

    tensors   by name: x, choices and weights, which the caller gave and may hold as well; h and h_scales, fc1's result;
              codes of the weights (w1.columnwise ...); scales of delayed scaling; in "keep_all" the routing, and the
              operands of the weights' gradients (x.columnwise ..., a.columnwise ...), of which x in high precision is
              by row only if the backend's GEMM does not read the tokens
    tokens    T
    """

    tensors: dict[str, int]
    tokens: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.tensors.values())

    @property
    def weight_codes(self) -> int:
        """The codes of the weights alone, which do not depend on the number of tokens."""
        return sum(size for name, size in self.tensors.items() if name.startswith(("w1.", "w2.")))

    @property
    def per_token(self) -> float:
        """What is kept of a token: all but the codes of the weights."""
        return (self.total - self.weight_codes) / self.tokens

    @property
    def allocated(self) -> int:
        """All of them as torch's CUDA allocator counts, which rounds each up to 512 bytes."""
        return sum(-(-size // _BLOCK) * _BLOCK for size in self.tensors.values())


def bytes_kept(
    recipe: Recipe | str | None,
    shape: MoeShape,
    form: Literal["keep_all", "standard", "lean", "recompute"] = "standard",
    *,
    weight_codes: Literal["keep", "remake"] = "keep",
    activation: Activation = "swiglu",
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    backend: str | Sequence[str] | None = None,
    transposed: bool = False,
) -> KeptBytes:
    """What `moe_mlp` with these arguments keeps from forward to backward, where every gradient is asked for.

    dtype, device   of x and the weights; None: the CPU. Layouts of codes, which are padded, are those that the backend
                    has chosen there
    transposed      w1 and w2 are views of matrices [G, K, 2 F] and [G, F, N], as gpt-oss's are: where the backend reads
                    them so, their codes are padded in another way

    Choices are counted as int64 and their weights as fp32. Nothing is computed or allocated. Raises ValueError for
    arguments that do not fit, NoBackendError where no installed backend serves the recipe.
    """
    recipe = recipe_of(recipe)
    if not isinstance(shape, MoeShape):
        raise ValueError(f"shape is {brief(shape)}; give an octavo_torch.MoeShape")
    shape.check()
    form, weight_codes = check_form(form), check_weight_codes(weight_codes)
    name = check_activation(activation)
    check_device(device)
    check_dtype(dtype)
    check_flag("transposed", transposed)
    operands = _Operands(shape, name, dtype, torch.device(device or "cpu"), transposed)
    plan = operands.plan(recipe, form, weight_codes, backend)
    each = dtype.itemsize
    rows = shape.tokens * shape.k
    tensors = {"x": shape.tokens * shape.in_features * each, "choices": 8 * rows, "weights": 4 * rows}
    if form == "keep_all":
        del tensors["x"], tensors["choices"]
        tensors |= {"order": 8 * rows, "position": 8 * rows, "routed": rows, "sizes": 8 * shape.experts}
        tensors |= operands.rows(plan, recipe)
    if form == "lean":
        tensors |= {"h": rows * operands.inner, "h_scales": 4 * rows * -(-operands.inner // 128)}
    elif form != "recompute":
        tensors["h"] = rows * operands.inner * each
    if weight_codes == "keep":
        tensors |= operands.weights(plan, form)
    if recipe.stateful and not (form == "keep_all" and weight_codes == "keep"):
        tensors |= {"scale0": 12 * shape.experts, "scale1": 12 * shape.experts}
    return KeptBytes(tensors, shape.tokens)


class _Operands:
    """Tensors without memory in a layer's shapes, and what its quantizers make of them."""

    def __init__(
        self, shape: MoeShape, activation: Activation, dtype: torch.dtype, device: torch.device, transposed: bool
    ) -> None:
        self.activation = activation
        self.inner = shape.hidden_features * (2 if activation in GATED else 1)
        out_features = shape.out_features or shape.in_features
        self._tokens, self._rows, experts = shape.tokens, shape.tokens * shape.k, shape.experts
        self._mode = FakeTensorMode()
        with self._mode:
            self._x = torch.empty(self._rows, shape.in_features, dtype=dtype, device=device)
            self._a = torch.empty(self._rows, shape.hidden_features, dtype=dtype, device=device)
            self._w1, self._w2 = (
                torch.empty(experts, columns, rows, dtype=dtype, device=device).mT
                if transposed
                else torch.empty(experts, rows, columns, dtype=dtype, device=device)
                for rows, columns in ((self.inner, shape.in_features), (out_features, shape.hidden_features))
            )
            self._sizes = torch.empty(experts, dtype=torch.int64, device=device)
            self._scale = torch.empty(experts, device=device)

    def plan(
        self, recipe: Recipe, form: Form, weight_codes: WeightCodes, backend: str | Sequence[str] | None
    ) -> MoePlan:
        """What moe_mlp runs with all gradients."""
        x, w1, w2 = self._x, self._w1, self._w2
        needed, names = RequiredGradients(True, True, True, True), backend_names(backend)
        full = mlp_plan_for(recipe, self.activation, x, w1, w2, x.device.type == "cpu", needed, names)
        hidden = rows_plan(x, w1.shape[1], w1.shape[0], names) if form == "lean" else None
        return moe_plan_for(full, form, weight_codes, hidden)

    def rows(self, plan: MoePlan, recipe: Recipe) -> dict[str, int]:
        """What backward reads of x and of the activation, which is computed again where no codes of it are read."""
        if not recipe.quantizes("wgrad"):
            each = self._x.element_size() * self._x.shape[1]
            return {"x": (self._tokens if plan.x_in_wgrad == "tokens" else self._rows) * each}
        columns = PLANES_OF["columnwise"]
        first = self._planes("x", plan.forward.fc1, "x", self._x, columns)
        return first | self._planes("a", plan.forward.fc2, "x", self._a, columns)

    def weights(self, plan: MoePlan, form: Form) -> dict[str, int]:
        """The weights' codes as backward reads them."""
        fc1, fc2 = plan.forward.fc1, plan.forward.fc2
        first, second = (layer.w_planes.dgrad if layer.quantized_dgrad else () for layer in (fc1, fc2))
        again = fc1.w_planes.fprop if form == "recompute" and fc1.quantized_fprop else ()
        codes = self._planes("w1", fc1, "w", self._w1, (*again, *first))
        return codes | self._planes("w2", fc2, "w", self._w2, second)

    def _planes(
        self, name: str, layer: Layer, operand: Operand, value: Tensor, planes: tuple[str, ...]
    ) -> dict[str, int]:
        run = layer.quantize_w if operand == "w" else layer.quantize_x
        if run is None or not planes:
            return {}
        how: dict[str, Any] = {"scale": self._scale} if layer.stateful else {}
        with self._mode:
            sizes = None if operand == "w" else self._sizes
            codes: GroupedTensor = run(value, sizes, seed=0, operand=operand, group_offset=0, **how)
        kept = [(plane, getattr(codes, plane)) for plane in planes]
        sizes_of = {id(tensor): (plane, tensor.nbytes) for plane, tensor in reversed(kept) if tensor is not None}
        return {f"{name}.{plane}": size for plane, size in reversed(list(sizes_of.values()))}
