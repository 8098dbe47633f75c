"""`recorder` of a forward GEMM's answer: launches that were written down are made again on other arrays."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.quantizer import Operand
from octavo_conformance.cards import selections
from octavo_conformance.cards.needs import needs
from octavo_conformance.oracles.checks import assert_same_bits
from octavo_conformance.problems.case import Case
from octavo_conformance.problems.inputs import Rng
from octavo_conformance.problems.operands import MAIN, RUN_ORDER, by_definition, draw_problem, gemm_operand
from octavo_registry.contract.frameworks import Recording
from octavo_registry.contract.plan import Plan

READ = ("rowwise", "rowwise_scale", "rowwise_global")


class Call:
    """fprop on arrays of its own. `arrays` are those that it reads: planes of x and w, and the sizes last."""

    def __init__(self, case: Case, plan: Plan[Any, Any], rng: Rng) -> None:
        problem = draw_problem(rng, case.dtype)
        quantizes = case.recipe.quantizes("fprop")

        def operand(name: Operand) -> Any:
            codes = by_definition(problem, case.recipe, name) if quantizes else None
            return gemm_operand(case, plan, problem, name, codes)

        x, w = self._operands = [operand(name) for name in RUN_ORDER["fprop"]]
        sizes = x.group_sizes if quantizes else case.sizes(problem.sizes)
        planes = [getattr(q, name) for q in (x, w) for name in READ] if quantizes else [x, w]
        self.arrays = [*(plane for plane in planes if plane is not None), sizes]
        self._run = plan.run

    def __call__(self) -> Any:
        return self._run(*self._operands, self.arrays[-1])


@needs("gemm", selections.few_fprops)
def test_a_pass_is_made_again_on_other_arrays(case: Case, rng: Rng) -> None:
    """Written down once, with the result of a direct call, and made again with other values and group sizes at other
    addresses, the launches have the bits of direct calls; one that reads an array without a number is refused, because
    it would read what lay there. Needs an answer with `recorder`, and a front end whose bridge has
    `write_down`."""
    _, K, N, groups = MAIN
    plan = case.plan("fprop", k=K, n=N, groups=groups)
    bound: Any = plan.bound
    make = bound.recorder
    if make is None:
        pytest.skip("the answer has no recorder: front ends compose passes of calls")
    if not isinstance(case.bridge, Recording):
        pytest.skip(
            f"the bridge of {case.bridge.name} has no write_down(make, call, arrays): nobody asks for a recorder"
        )
    first, *others = (Call(case, plan, rng) for _ in range(3))
    y, again = case.bridge.write_down(make, first, first.arrays)
    assert_same_bits(case.numpy(y), case.numpy(first()), "y of the call that was written down")
    for number, other in enumerate([*others, first]):
        assert_same_bits(case.numpy(again(other.arrays)), case.numpy(other()), f"y of other arrays, {number}")
    for number in range(len(first.arrays)):
        with pytest.raises(ValueError, match=r"\w"):
            case.bridge.write_down(make, first, [*first.arrays[:number], *first.arrays[number + 1 :]])
