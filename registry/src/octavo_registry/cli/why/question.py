"""What `octavo why` is asked: the operation or the composition, and the requests that it comes to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from octavo import Recipe
from octavo.quantizer import Operand
from octavo.recipe_base import GEMMS
from octavo_registry.cli.errors import BadInput
from octavo_registry.contract.cards import GATED, MOVES, OPTIMIZERS, ROUTERS, Activation, Norm, Op
from octavo_registry.contract.request import GemmRequest, OptimizerRequest, Request, describe_request
from octavo_registry.contract.weights import as_it_lies
from octavo_registry.dispatch.layer_requests import (
    ACTIVATED,
    activation_request,
    common_fields,
    dequantize_request,
    gemm_request,
    norm_request,
    operand_spec,
    quantize_request,
)

LAYER, MLP, MOE = "layer", "mlp", "moe"
COMPOSED = (LAYER, MLP, MOE)
"""Questions about several operations: a grouped linear layer, an expert MLP, and a whole MoE layer around it."""

OPERATIONS: tuple[str, ...] = (*get_args(Op), *COMPOSED)
SIZES: tuple[Literal["host", "device"], ...] = ("host", "device")
_WHOLE = {MLP: "An expert MLP", MOE: "A MoE layer"}
_OPERAND_OF: dict[str, Operand] = {"act_quantize": "x", "norm_quantize": "x", "dact_quantize": "dy"}


@dataclass(frozen=True, slots=True)
class Question:
    """A parsed `why`.

    op     an operation, or one of `COMPOSED`
    layer  the fprop request of its layer, with the whole recipe; of an MLP `n` is F, the width of the activation
    """

    op: str
    operand: Operand
    layer: GemmRequest
    recipe: Recipe
    activation: Activation
    norm: Norm

    def title(self, request: Request) -> str:
        """What was asked, in words: of a composition the whole, and the product that its verdicts are about."""
        words = describe_request(request)
        if self.op not in COMPOSED:
            return words
        whole = "A grouped linear layer" if self.op == LAYER else f"{_WHOLE[self.op]} with {self.activation}"
        passes = "forward and backward" if self.layer.training else "forward alone"
        return f"{whole} in {self.recipe.kind}, {passes}: who serves its first product, {words}"

    def gemm_requests(self) -> dict[str, GemmRequest]:
        """The GEMMs that the operation is or consists of, by name; BadInput for one without GEMMs."""
        if self.op in GEMMS:
            return {gemm: gemm_request(self.layer, self.recipe, gemm) for gemm in GEMMS if gemm == self.op}
        if self.op not in COMPOSED:
            raise BadInput(f"--kernels: {self.op} is not a GEMM; ask for one of {', '.join((*GEMMS, *COMPOSED))}")
        gemms = GEMMS if self.layer.training else GEMMS[:1]
        return {
            f"{name} {gemm}".strip(): gemm_request(layer, self.recipe, gemm)
            for name, layer in self.layers().items()
            for gemm in gemms
        }

    def layers(self) -> dict[str, GemmRequest]:
        """The fprop requests of the layers that a composition has, by name: fc1 and fc2 of an MLP."""
        if self.op not in (MLP, MOE):
            return {"": self.layer}
        k, f = self.layer.k, self.layer.n
        wide = None if f is None else 2 * f if self.activation in GATED else f
        return {"fc1": replace(self.layer, k=k, n=wide), "fc2": replace(self.layer, k=f, n=k)}

    def request(self) -> Request:
        """The request of the operation itself; of a composition the first layer's fprop."""
        if self.op in GEMMS:
            gemm = next(gemm for gemm in GEMMS if gemm == self.op)
            return gemm_request(self.layer, self.recipe, gemm)
        if self.op in COMPOSED:
            return gemm_request(next(iter(self.layers().values())), self.recipe, "fprop")
        if self.op in MOVES | ROUTERS:
            known: Op = next(op for op in MOVES | ROUTERS if op == self.op)
            moved: Request = Request(**common_fields(self.layer) | {"op": known, "out_dtype": self.layer.in_dtype})
            return moved
        if self.op in OPTIMIZERS:
            coded = operand_spec(self.recipe, "w", self.layer.training)
            masters: dict[str, Any] = common_fields(self.layer) | {"op": "adamw_step", "out_dtype": "float32"}
            return OptimizerRequest(**masters, quantizer=coded and as_it_lies(coded, "w", self.layer.weight))
        operand = _OPERAND_OF.get(self.op, self.operand)
        spec = operand_spec(self.recipe, operand, self.layer.training)
        if spec is None:
            raise BadInput(f"--recipe: {self.recipe.kind} does not quantize {operand}; there is nothing to {self.op}")
        spec = as_it_lies(spec, operand, self.layer.weight)
        quantize = quantize_request(self.layer, spec, operand, ("plain", "plain"))
        if self.op == "norm_quantize":
            return norm_request(quantize, self.norm)
        for op in ACTIVATED:
            if op == self.op:
                return activation_request(quantize, op, self.activation)
        return quantize if self.op == "quantize" else dequantize_request(quantize)

    def requests(self) -> tuple[Request, ...]:
        """Every request that has to be served: of a composition those of its layers' GEMMs and quantizers."""
        if self.op not in COMPOSED:
            return (self.request(),)
        found: list[Request] = list(self.gemm_requests().values())
        for layer in self.layers().values():
            for operand in get_args(Operand):
                spec = operand_spec(self.recipe, operand, layer.training)
                if spec is not None:
                    lies = as_it_lies(spec, operand, layer.weight)
                    found.append(quantize_request(layer, lies, operand, ("plain", "plain")))
        return tuple(found)


_OPTIONS_FOR: dict[str, frozenset[str]] = {
    "operand": frozenset({"quantize", "dequantize"}),
    "activation": frozenset({*ACTIVATED, MLP, MOE}),
    "norm": frozenset({"norm_quantize"}),
}


def check_options(op: str, **given: str | None) -> None:
    """BadInput for an option that the answer to `op` does not depend on."""
    for name, value in given.items():
        if value is not None and op not in _OPTIONS_FOR[name]:
            whose = ", ".join(sorted(_OPTIONS_FOR[name]))
            raise BadInput(f"--{name} {value}: {op} does not depend on it; leave it out (it is for {whose})")


def parse_shape(text: str) -> tuple[int, int, int, int]:
    """M, K, N and G of `--shape`, which is G,K,N,M as in `octavo bench`."""
    parts = text.replace("x", ",").split(",")
    if len(parts) != 4 or not all(part.strip().isdecimal() for part in parts):
        raise BadInput(f"--shape: got {text!r}; give G,K,N,M (groups, in-features, out-features, rows)")
    g, k, n, m = (int(part) for part in parts)
    if min(k, n, g) < 1:
        raise BadInput(f"--shape: got {text!r}; G, K and N are 1 or more")
    if max(g, k, n, m) >= 1 << 63:
        raise BadInput(f"--shape: got {text!r}; sizes of arrays are below 2^63")
    return m, k, n, g
