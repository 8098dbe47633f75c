"""`in_two_forms` and `multiplied` of a quantizer's answer: planes that GEMMs read in the place of codes with the same
bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial
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
ROWS_OF: tuple[Operand, ...] = ("x", "dy")
"""What `of_tokens` may quantize."""

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

    def made(self, operand: Operand, answer: Any) -> Any:
        """What a quantizer's answer makes of the problem's array."""
        return self.quantized(operand, answer.run)

    def assert_forms(self, operand: Operand, codes: Any, forms: TwoForms[Any], what: str) -> None:
        """Each GEMM that reads a plane of the operand has the bits that it has on `codes`."""
        again = forms.multiply(forms.codes)
        for direction in self.specs[operand].directions:
            tensors = {
                "codes": forms.codes,
                "multiplied": forms.multiplied,
                "multiply(codes)": again,
                f"multiply of the {direction} plane": forms.multiply(self._alone(forms.codes, direction)),
            }
            named = {f" in two forms{what}, which is {form}": tensor for form, tensor in tensors.items()}
            self.assert_products(operand, direction, codes, named)

    def assert_multiplied(self, operand: Operand, bound: Any, codes: Any, make: Callable[[Any], Any], what: str) -> int:
        """So it has on what `make` makes by the answers of `bound.multiplied`, for each set of directions. Returns how
        many there are: none where the backend has no such answer."""
        directions = self.specs[operand].directions
        sets = {frozenset(directions), *(frozenset({direction}) for direction in directions)}
        answers = {each: bound.multiplied(each) for each in sets} if bound.multiplied is not None else {}
        tensors = {
            f"{what}, whose {' and '.join(sorted(chosen))} planes are multiplied": make(answer)
            for chosen, answer in answers.items()
        }
        for direction in directions:
            self.assert_products(operand, direction, codes, tensors)
        return len(answers)

    def assert_products(self, operand: Operand, direction: Direction, codes: Any, tensors: Mapping[str, Any]) -> None:
        """The GEMM that reads this plane has the bits on each of `tensors`, by what it is, that it has on `codes`."""
        gemm = readers(operand, "nk")[DIRECTIONS.index(direction)]
        if gemm not in self._gemms:
            return
        expected = self._product(gemm, operand, codes)
        for what, tensor in tensors.items():
            assert_same_bits(self._product(gemm, operand, tensor), expected, f"{gemm} of {operand}{what}")

    def _product(self, gemm: Gemm, operand: Operand, tensor: Any) -> Array:
        operands = {**self.codes, operand: tensor}
        return self.case.numpy(self._gemms[gemm].run(*(operands[name] for name in RUN_ORDER[gemm]), self.sizes))

    def _alone(self, codes: Any, direction: Direction) -> Any:
        """The codes with one plane."""
        names = [f"{direction}{part}" for part in ("", "_scale", "_global")]
        planes = {name: plane for name in names if (plane := getattr(codes, name)) is not None}
        return self.case.bridge.grouped_tensor(codes.spec, codes.group_sizes, planes)


class OfTokens(Layer):
    """A layer of the rows of a router's choices; `made` quantizes them from the tokens."""

    def __init__(self, case: Case, rng: Rng) -> None:
        self._routing = by_contract(draw_choices(rng))
        sizes = self._routing.sizes
        self._drawn = draw_problem(rng, case.dtype, (TOKENS, K, N, len(sizes)), sizes)
        rows = self._routing.order // CHOICES
        super().__init__(case, replace(self._drawn, x=self._drawn.x[rows], dy=self._drawn.dy[rows]))

    def made(self, operand: Operand, answer: Any) -> Any:
        """What `of_tokens` of the answer makes."""
        arguments = quantizer_arguments(self.case, self.problem, operand, self.specs[operand])
        tokens, places = self.case.array(self._drawn.of(operand)), on_device(self.case, self._routing)
        return answer.of_tokens(tokens, self.sizes, *places, **arguments)[0]


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
        layer.assert_forms(name, layer.codes[name], layer.made(name, answer), "")


@needs("layer", selections.few_recipes)
def test_gemms_read_both_forms_of_tokens(case: Case, rng: Rng) -> None:
    """So it is of rows of a router's choices that `of_tokens` quantizes from the tokens, x and dy."""
    layer = OfTokens(case, rng)
    served = [name for name in ROWS_OF if getattr(layer.answers.get(name), "of_tokens", None)]
    if not served:
        pytest.skip("no answer in two forms has of_tokens: front ends permute rows first")
    for name in served:
        layer.assert_forms(name, layer.codes[name], layer.made(name, layer.answers[name]), " of tokens")


@needs("layer", selections.few_recipes)
def test_gemms_read_both_forms_of_what_is_fused(case: Case, rng: Rng) -> None:
    """So it is of an activation, of its gradient, and of normalized rows."""
    layer, tried = Layer(case, draw_problem(rng, case.dtype)), 0
    for op, operand, bound, make in _fused_of(layer, rng):
        answer = _in_two_forms(bound)
        if answer is None:
            continue
        tried += 1
        layer.assert_forms(operand, make(bound), make(answer), f" of {op}")
    if not tried:
        pytest.skip("no answer of a fused quantizer has in_two_forms: the backend's GEMMs multiply codes")


@needs("layer", selections.few_recipes)
def test_gemms_read_multiplied_planes(case: Case, rng: Rng) -> None:
    """fprop, dgrad and wgrad have the same bits on codes and on planes that the answers of `multiplied` write in their
    place, and on the codes beside such planes; so it is of an activation and of its gradient."""
    layer, tried = Layer(case, draw_problem(rng, case.dtype)), 0
    for name, quantizer in layer.quantizers.items():
        tried += layer.assert_multiplied(name, quantizer.bound, layer.codes[name], partial(layer.made, name), "")
    for op, operand, bound, make in _fused_of(layer, rng):
        if op != "norm_quantize":
            tried += layer.assert_multiplied(operand, bound, make(bound), make, f" of {op}")
    if not tried:
        pytest.skip("the answers have no multiplied: the backend's GEMMs multiply codes, or programs ask for two forms")


@needs("layer", selections.few_recipes)
def test_gemms_read_multiplied_planes_of_tokens(case: Case, rng: Rng) -> None:
    """So it is of rows of a router's choices that `of_tokens` quantizes from the tokens, x and dy."""
    layer, tried = OfTokens(case, rng), 0
    bounds: dict[Operand, Any] = {name: layer.quantizers[name].bound for name in ROWS_OF if name in layer.quantizers}
    for name, bound in bounds.items():
        answer = None if bound.multiplied is None else bound.multiplied(frozenset(layer.specs[name].directions))
        if answer is not None and answer.of_tokens is not None:
            make = partial(layer.made, name)
            tried += layer.assert_multiplied(name, bound, layer.codes[name], make, " of tokens")
    if not tried:
        pytest.skip("no answer with multiplied has of_tokens: front ends permute rows first")


def _fused_of(layer: Layer, rng: Rng) -> Iterator[tuple[FusedOp, Operand, Any, Callable[[Any], Any]]]:
    """The operations of fused quantizers that the backend has: each with its operand, its answer, and a function that
    returns what an answer makes of arrays that are the same each time."""
    case = layer.case
    arrays: dict[FusedOp, tuple[Operand, list[Array | None]]] = {
        "act_quantize": ("x", [draw(rng, (ROWS, 2 * K), case.dtype)]),
        "dact_quantize": ("dy", [draw(rng, (ROWS, N // 2), case.dtype), draw(rng, (ROWS, N), case.dtype)]),
        "norm_quantize": ("x", [layer.problem.x, draw(rng, (K,), case.dtype), None]),
    }
    for op, (operand, given) in arrays.items():
        plan = _fused(layer, op, operand)
        if plan is None:
            continue
        operands = [None if array is None else case.array(array) for array in given]
        arguments = quantizer_arguments(case, layer.problem, operand, layer.specs[operand])

        def make(answer: Any, operands: list[Any] = operands, arguments: dict[str, Any] = arguments) -> Any:
            return answer.run(*operands, layer.sizes, **arguments)[0]

        yield op, operand, plan.bound, make


def _fused(layer: Layer, op: FusedOp, operand: Operand) -> Plan[Any, Any] | None:
    """The plan of a fused quantizer of this operand; None where the backend has none, or the recipe quantizes none."""
    if operand not in layer.quantizers:
        return None
    case, request = layer.case, layer.quantizers[operand].request
    of = {"norm": "rms"} if op == "norm_quantize" else {"activation": "swiglu"}
    fields = {name: getattr(request, name) for name in ("quantizer", "k", "groups", "out_dtype", "layouts")}
    wanted = case.request(op, **fields, **of)
    return None if case.refusal_of(wanted) is not None else plan(wanted, backend=case.backend)
