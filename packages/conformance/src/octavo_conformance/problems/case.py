"""One test case: a target, a variant, and the registry's word on whether the backend declares it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from octavo import NoBackendError, QuantizerSpec
from octavo.quantizer import Operand
from octavo.recipe_base import GEMMS, Gemm
from octavo_conformance.cards.needs import Need
from octavo_conformance.cards.targets import Target
from octavo_conformance.cards.variants import FusedVariant, QuantizerVariant, RecipeVariant, Variant
from octavo_conformance.problems.inputs import Array
from octavo_registry import explain, plan
from octavo_registry.contract.cards import MOVES, OPTIMIZERS, QUANTIZERS, ROUTERS, Capability
from octavo_registry.contract.frameworks import Framework
from octavo_registry.contract.plan import Plan
from octavo_registry.contract.request import REQUESTS, Request
from octavo_registry.dispatch.match import match

OPERANDS: tuple[Operand, ...] = ("x", "w", "dy")


@dataclass(frozen=True)
class Case:
    """What a test receives as `case`. Arrays go in and out as numpy; the framework's own stay inside the bridge."""

    target: Target
    need: Need
    variant: Variant

    @property
    def id(self) -> str:
        """Stable text for test ids."""
        return f"{self.target.id}-{self.variant.id}"

    @property
    def bridge(self) -> Framework:
        """The way to the framework's arrays."""
        return self.target.bridge

    @property
    def backend(self) -> list[str]:
        """The closed preference that lets nothing but the backend under test serve."""
        return [self.target.name]

    @property
    def spec(self) -> QuantizerSpec:
        """The quantizer of a quantizer variant, in the planes that the card's rows for it make."""
        assert isinstance(self.variant, QuantizerVariant)
        spec, card = self.variant.spec, self.target.card
        rows = [
            row
            for row in card.capabilities
            if self.variant.kind in row.recipes and self.need.op in row.ops and self.variant.dtype in row.in_dtypes
            if (row.framework, row.device) == (self.bridge.name, self.target.device.kind)
        ]
        made = {plane for row in rows for plane in row.orientations}
        if spec.orientation != "both" or len(made) != 1:
            return spec
        return spec.with_orientation(made.pop())

    @property
    def function(self) -> Any:
        """The activation or the norm of a fused variant."""
        assert isinstance(self.variant, FusedVariant)
        return self.variant.function

    @property
    def recipe(self) -> Any:
        """The recipe of a recipe variant."""
        assert isinstance(self.variant, RecipeVariant)
        return self.variant.recipe

    @property
    def gemm(self) -> Gemm:
        """The GEMM of a recipe variant that has one."""
        assert isinstance(self.variant, RecipeVariant)
        assert self.variant.gemm is not None
        return self.variant.gemm

    @property
    def dtype(self) -> Any:
        """Name of the input dtype."""
        return self.variant.dtype

    @property
    def writes_arrays(self) -> bool:
        """Whether the framework's arrays can be written: those of JAX cannot, and what would be is a result."""
        return self.bridge.name != "jax"

    def facts(self) -> dict[str, str]:
        """What a gap may name."""
        op = self.gemm if self.need.op == "gemm" else self.need.op
        return {
            "backend": self.target.name,
            "framework": self.bridge.name,
            "device": self.target.device.kind,
            "op": op,
            "recipe": self.variant.kind,
            "variant": self.variant.name,
            "dtype": self.dtype,
        }

    def request(self, op: Any, **fields: Any) -> Request:
        """A request for `op` of this case; sizes on the device where the card declares that, else on the host."""
        base: dict[str, Any] = {
            "op": op,
            "framework": self.bridge.name,
            "device": self.target.device.kind,
            "arch": self.target.device.arch,
            "in_dtype": self.dtype,
            "out_dtype": self.dtype,
        }
        if isinstance(self.variant, QuantizerVariant):
            base |= {"quantizer": self.spec} | ({} if op == "dequantize" else {"stacked": self.variant.stacked})
            if isinstance(self.variant, FusedVariant):
                base["norm" if op == "norm_quantize" else "activation"] = self.variant.function
        elif op in GEMMS:
            base["recipe"] = self.variant.recipe.for_gemm(op)
        known = REQUESTS[op].__dataclass_fields__  # a need's weight is its GEMMs', not its quantizers'
        conditions = {name: value for name, value in self.need.conditions.items() if name in known}
        request = Request(**(base | conditions | fields))
        if "sizes" not in self.need.conditions and "sizes" not in fields and self.refusal_of(request) is not None:
            on_host = replace(request, sizes="host")
            return on_host if self.refusal_of(on_host) is None else request
        return request

    def requests(self, **fields: Any) -> Iterator[Request]:
        """Everything that the test will ask the backend for."""
        if self.need.op in (*QUANTIZERS, "dequantize"):
            result = {"out_dtype": "float32"} if self.need.op == "dequantize" else {}
            yield self.request(self.need.op, **(result | fields))
        elif self.need.op in MOVES | ROUTERS | OPTIMIZERS:
            yield self.request(self.need.op, **fields)
        elif self.need.op == "gemm":
            yield self.request(self.gemm, **fields)
        else:
            k, n = fields.pop("k", None), fields.pop("n", None)
            for gemm in GEMMS:
                yield self.request(gemm, k=k, n=n, **fields)
            for operand in OPERANDS:
                spec = self.recipe.quantizer(operand)
                if spec is not None:
                    columns = n if operand == "dy" else k
                    yield self.request("quantize", quantizer=spec, stacked=operand == "w", k=columns, **fields)

    def refusal_of(self, request: Request) -> str | None:
        """The registry's own reason why the backend does not get `request`, or None; a broken backend fails."""
        mine = [row for row in explain(request, backend=self.backend) if row.backend == self.target.name]
        if not mine:
            return "the registry gives no verdict on it"
        if mine[0].verdict == "broken":
            pytest.fail(f"{self.target.name} is broken: {mine[0].reason}", pytrace=False)
        return mine[0].reason if mine[0].verdict == "refused" else None

    def refusal(self, **fields: Any) -> str | None:
        """The first refusal among all requests of this case."""
        for request in self.requests(**fields):
            reason = self.refusal_of(request)
            if reason is not None:
                return f"{request.op}: {reason}"
        return None

    def capability(self, op: Any) -> Capability:
        """The card row that admits `op`."""
        row = match(self.target.card, self.request(op))
        assert isinstance(row, Capability), row
        return row

    def plan(self, op: Any, **fields: Any) -> Plan:
        """The backend's plan for `op`; skips with the registry's reason where these shapes are refused."""
        request = self.request(op, **fields)
        reason = self.refusal_of(request)
        if reason is not None:
            pytest.skip(f"{op}: {reason}")
        return plan(request, backend=self.backend)

    @contextmanager
    def admitted(self, **fields: Any) -> Iterator[None]:
        """Skips where `NoBackendError` comes from shapes that the backend refuses; else lets it fail the test."""
        try:
            yield
        except NoBackendError:
            reason = self.refusal(**fields)
            if reason is None:
                raise
            pytest.skip(reason)

    def array(self, values: Array) -> Any:
        """A framework array on the target's device."""
        return self.bridge.from_numpy(values, self.target.device.kind)

    def sizes(self, values: Array) -> Any:
        """Group sizes as an int32 framework array on the target's device."""
        return self.array(values.astype("int32"))

    def numpy(self, array: Any) -> Array:
        """The same bits in numpy."""
        assert hasattr(array, "dtype"), (
            f"{self.target.name} returned a {type(array).__name__} where an array of {self.bridge.name} is needed"
        )
        return self.bridge.to_numpy(array)

    def integers(self, array: Any) -> Array:
        """As int64, which JAX has not unless it is turned on: there they are int32."""
        values = self.numpy(array)
        kinds = ("int32", "int64") if self.bridge.name == "jax" else ("int64",)
        assert values.dtype in kinds, f"integers are {values.dtype}; they are {' or '.join(kinds)}"
        return values.astype("int64")

    def quantize(self, x: Array, sizes: Array | list[int] | None = None, **arguments: Any) -> Any:
        """The front end's quantize with this backend alone; a GroupedTensor of the framework."""
        arguments.setdefault("spec", self.spec if isinstance(self.variant, QuantizerVariant) else None)
        spec = arguments.pop("spec")
        scale = arguments.pop("scale", None)
        on_device = sizes if sizes is None or isinstance(sizes, list) else self.sizes(sizes)
        with self.admitted(k=x.shape[-1]):
            return self.bridge.quantize(
                self.array(x),
                spec,
                on_device,
                scale=None if scale is None else self.array(scale),
                backend=self.backend,
                **arguments,
            )


Measure = Callable[[str, float], None]
"""`measure(name, value)`: keeps the largest value of a row's metric for the report."""

Examples = Callable[[Callable[..., None]], None]
"""`examples(test)`: runs a hypothesis test with the session's seed and number of examples."""
