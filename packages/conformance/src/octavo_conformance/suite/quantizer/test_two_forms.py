"""`in_two_forms` of a quantizer's answer: codes, and planes that GEMMs read in their place with the same bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

import pytest

from octavo import QuantizerSpec
from octavo.grouped_tensor import PLAIN
from octavo.quantizer import Direction, Operand
from octavo.recipe_base import GEMMS, Gemm
from octavo_conformance.cards import selections
from octavo_conformance.cards.needs import needs
from octavo_conformance.oracles.checks import assert_same_bits
from octavo_conformance.problems.case import OPERANDS, Case
from octavo_conformance.problems.inputs import Array, Rng, draw
from octavo_conformance.problems.operands import (
    MAIN,
    RUN_ORDER,
    Problem,
    draw_problem,
    quantizer_arguments,
    quantizer_to,
)
from octavo_conformance.suite.gemm.test_moves import CHOICES, TOKENS, by_contract, draw_choices, on_device
from octavo_registry import plan
from octavo_registry.contract.plan import Plan
from octavo_registry.contract.quantize import TwoForms
from octavo_registry.contract.weights import readers

DIRECTIONS: tuple[Direction, Direction] = ("rowwise", "columnwise")
ROWS, K, N, _ = MAIN

FusedOp = Literal["act_quantize", "dact_quantize", "norm_quantize"]


class Layer:
    """A layer's GEMMs, the quantizers of operands to the layouts that these read, and the codes that they make."""

    def __init__(self, case: Case, problem: Problem) -> None:
        self.case, self.problem, self.sizes = case, problem, case.sizes(problem.sizes)
        groups, n, k = problem.w.shape
        self._gemms = {gemm: case.plan(gemm, k=k, n=n, groups=groups) for gemm in GEMMS if case.recipe.quantizes(gemm)}
        specs: dict[Operand, QuantizerSpec | None] = {name: case.recipe.quantizer(name) for name in OPERANDS}
        self.specs = {name: spec for name, spec in specs.items() if spec is not None}
        self.quantizers = {
            name: quantizer_to(case, self.problem, name, spec, self.layouts(name)) for name, spec in self.specs.items()
        }

    @cached_property
    def codes(self) -> dict[Operand, Any]:
        """Of each operand, by `run`."""
        return {name: self.quantized(name, quantizer.run) for name, quantizer in self.quantizers.items()}

    @cached_property
    def answers(self) -> dict[Operand, Any]:
        """The answers of quantizers in two forms; skips where there are none."""
        answers = {name: _in_two_forms(quantizer.bound) for name, quantizer in self.quantizers.items()}
        if not any(answers.values()):
            pytest.skip("the answers have no in_two_forms: the backend's GEMMs multiply codes")
        return {name: answer for name, answer in answers.items() if answer is not None}

    def layouts(self, operand: Operand) -> tuple[str, str]:
        """In which the GEMMs read both planes of an operand."""
        rowwise, columnwise = (
            self._gemms[gemm].layouts.get(operand, PLAIN) if gemm in self._gemms else PLAIN
            for gemm in readers(operand, "nk")
        )
        return rowwise, columnwise

    def quantized(self, operand: Operand, run: Callable[..., Any]) -> Any:
        """What `run`, of the operand's quantizer, makes of the problem's array."""
        arguments = quantizer_arguments(self.case, self.problem, operand, self.specs[operand])
        return run(self.case.array(self.problem.of(operand)), None if operand == "w" else self.sizes, **arguments)

    def assert_forms(self, operand: Operand, codes: Any, forms: TwoForms[Any], what: str) -> None:
        """Each GEMM that reads a plane of the operand has the bits that it has on `codes`."""
        directions = self.specs[operand].directions
        again = forms.multiply(forms.codes)
        for direction, gemm in zip(DIRECTIONS, readers(operand, "nk"), strict=True):
            if direction not in directions or gemm not in self._gemms:
                continue
            expected = self._product(gemm, operand, codes)
            tensors = {
                "codes": forms.codes,
                "multiplied": forms.multiplied,
                "multiply(codes)": again,
                f"multiply of the {direction} plane": forms.multiply(self._alone(forms.codes, direction)),
            }
            for form, tensor in tensors.items():
                product = self._product(gemm, operand, tensor)
                assert_same_bits(product, expected, f"{gemm} of {operand} in two forms{what}, which is {form}")

    def _product(self, gemm: Gemm, operand: Operand, tensor: Any) -> Array:
        operands = {**self.codes, operand: tensor}
        return self.case.numpy(self._gemms[gemm].run(*(operands[name] for name in RUN_ORDER[gemm]), self.sizes))

    def _alone(self, codes: Any, direction: Direction) -> Any:
        """The codes with one plane."""
        names = [f"{direction}{part}" for part in ("", "_scale", "_global")]
        planes = {name: plane for name in names if (plane := getattr(codes, name)) is not None}
        return self.case.bridge.grouped_tensor(codes.spec, codes.group_sizes, planes)


def _in_two_forms(bound: Any) -> Any:
    """The answer, or None where the backend's GEMMs multiply codes."""
    if bound.in_two_forms is None:
        return None
    answer = bound.in_two_forms()
    assert bound.in_two_forms() is answer, "in_two_forms answers with another quantizer each time, which is bound anew"
    return answer


@needs("layer", selections.few_recipes)
def test_gemms_read_both_forms(case: Case, rng: Rng) -> None:
    """fprop, dgrad and wgrad have the same bits on the codes that `run` makes and, in two forms, on codes, on
    `multiplied`, and on what `multiply` makes of codes that were kept, of which one plane may be there alone."""
    layer = Layer(case, draw_problem(rng, case.dtype))
    for name, answer in layer.answers.items():
        layer.assert_forms(name, layer.codes[name], layer.quantized(name, answer.run), "")


@needs("layer", selections.few_recipes)
def test_gemms_read_both_forms_of_tokens(case: Case, rng: Rng) -> None:
    """So it is of rows of a router's choices that `of_tokens` quantizes from the tokens, x and dy."""
    routing = by_contract(draw_choices(rng))
    drawn = draw_problem(rng, case.dtype, (TOKENS, K, N, len(routing.sizes)), routing.sizes)
    rows = routing.order // CHOICES
    layer = Layer(case, replace(drawn, x=drawn.x[rows], dy=drawn.dy[rows]))
    served: list[Operand] = [name for name in ("x", "dy") if getattr(layer.answers.get(name), "of_tokens", None)]
    if not served:
        pytest.skip("no answer in two forms has of_tokens: front ends permute rows first")
    for name in served:
        arguments = quantizer_arguments(case, layer.problem, name, layer.specs[name])
        tokens, places = case.array(drawn.of(name)), on_device(case, routing)
        forms, _ = layer.answers[name].of_tokens(tokens, layer.sizes, *places, **arguments)
        layer.assert_forms(name, layer.codes[name], forms, " of tokens")


@needs("layer", selections.few_recipes)
def test_gemms_read_both_forms_of_what_is_fused(case: Case, rng: Rng) -> None:
    """So it is of an activation, of its gradient, and of normalized rows."""
    layer, tried = Layer(case, draw_problem(rng, case.dtype)), 0
    arrays: dict[FusedOp, tuple[Operand, list[Array | None]]] = {
        "act_quantize": ("x", [draw(rng, (ROWS, 2 * K), case.dtype)]),
        "dact_quantize": ("dy", [draw(rng, (ROWS, N // 2), case.dtype), draw(rng, (ROWS, N), case.dtype)]),
        "norm_quantize": ("x", [layer.problem.x, draw(rng, (K,), case.dtype), None]),
    }
    for op, (operand, given) in arrays.items():
        fused = _fused(layer, op, operand)
        answer = None if fused is None else _in_two_forms(fused.bound)
        if fused is None or answer is None:
            continue
        tried += 1
        operands = [None if array is None else case.array(array) for array in given]
        arguments = quantizer_arguments(case, layer.problem, operand, layer.specs[operand])
        (codes, _), (forms, _) = (run(*operands, layer.sizes, **arguments) for run in (fused.run, answer.run))
        layer.assert_forms(operand, codes, forms, f" of {op}")
    if not tried:
        pytest.skip("no answer of a fused quantizer has in_two_forms: the backend's GEMMs multiply codes")


def _fused(layer: Layer, op: FusedOp, operand: Operand) -> Plan[Any, Any] | None:
    """The plan of a fused quantizer of this operand; None where the backend has none, or the recipe quantizes none."""
    if operand not in layer.quantizers:
        return None
    case, request = layer.case, layer.quantizers[operand].request
    of = {"norm": "rms"} if op == "norm_quantize" else {"activation": "swiglu"}
    fields = {name: getattr(request, name) for name in ("quantizer", "k", "groups", "out_dtype", "layouts")}
    wanted = case.request(op, **fields, **of)
    return None if case.refusal_of(wanted) is not None else plan(wanted, backend=case.backend)
