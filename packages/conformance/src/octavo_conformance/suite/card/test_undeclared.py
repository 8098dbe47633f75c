"""A capability that works undeclared is a warning, because no request will ever reach it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from typing import Any

import numpy as np
import pytest

import octavo_numerics
from octavo.quantizer import Operand
from octavo_conformance import UndeclaredCapability
from octavo_conformance.cards.needs import Need
from octavo_conformance.cards.targets import Target
from octavo_conformance.cards.variants import RAGGED, RECIPES, QuantizerVariant, RecipeVariant
from octavo_conformance.oracles.checks import assert_same_tensor, assert_within_bound, blocks_of
from octavo_conformance.problems.case import OPERANDS, Case, Measure
from octavo_conformance.problems.inputs import Rng, draw
from octavo_conformance.problems.operands import RUN_ORDER, SEED, by_definition, draw_problem, to_framework
from octavo_conformance.reports.report import undeclared
from octavo_registry import backends
from octavo_registry.contract.request import Request
from octavo_registry.dispatch.match import match

SHAPE = (48, 64, 32, 2)


def _probes(target: Target) -> Iterator[tuple[Case, Request]]:
    """A case and request for each operation, recipe kind and dtype that the card does not declare."""
    dtypes: tuple[Any, ...] = ("bfloat16", "float16", "float32")
    for dtype in dtypes:
        for spec in {spec.scaling: spec for spec in RAGGED.values() if not spec.stochastic}.values():
            variant = QuantizerVariant(spec.scaling, spec, dtype)
            yield _case(target, "quantize", variant)
        for name, recipe in RECIPES.items():
            for gemm in ("fprop", "dgrad", "wgrad"):
                yield _case(target, "gemm", RecipeVariant(name, recipe, dtype, gemm))


def _case(target: Target, op: Any, variant: Any) -> tuple[Case, Request]:
    case = Case(target, Need(op, lambda full: [variant], {}), variant)
    groups = SHAPE[3]
    return case, next(iter(case.requests(k=SHAPE[1], groups=groups)))


def _load(target: Target) -> Any:
    """The backend object, past the registry, which would refuse what is not declared."""
    plugin = next(record.plugin for record in backends() if record.name == target.name)
    for point in metadata.entry_points(group="octavo.backends", name=plugin):
        if point.dist is not None and point.dist.name == target.distribution:
            return point.load().octavo_load(target.name)
    return None


def _works(case: Case, request: Request, backend: Any, rng: Rng, measure: Measure) -> bool:
    """True where the backend binds the request and its result is right; whatever it raises means no."""
    try:
        if backend.refuses(request) is not None:
            return False
        run = backend.bind(request).run
        sizes = np.array([17, 30], dtype=np.int32)
        if isinstance(case.variant, QuantizerVariant):
            x = draw(rng, SHAPE[:2], case.dtype)
            scale = np.array([8.0, 4.0], dtype=np.float32) if case.spec.scaling == "delayed" else None
            expected = octavo_numerics.quantize(x, case.spec, sizes, scale=scale)
            encode_scale = None if scale is None else case.array(scale)
            assert_same_tensor(
                case, run(case.array(x), case.sizes(sizes), operand=case.spec.role, scale=encode_scale), expected
            )
            return True
        problem = draw_problem(rng, case.dtype, SHAPE, sizes)
        tensors: dict[Operand, Any] = dict.fromkeys(OPERANDS)
        if case.recipe.quantizes(case.gemm):
            tensors = {operand: by_definition(problem, case.recipe, operand, seed=SEED) for operand in OPERANDS}
        operands = []
        for name in RUN_ORDER[case.gemm]:
            tensor = tensors[name]
            on_device = case.sizes(sizes)
            operands.append(case.array(problem.of(name)) if tensor is None else to_framework(case, tensor, on_device))
        actual = case.numpy(run(*operands, case.sizes(sizes)))
        parts = blocks_of(problem, case.recipe, case.gemm, tensors, actual)
        assert_within_bound(_declaring(case), case.recipe, case.gemm, parts, measure)
    except (Exception, pytest.fail.Exception):  # a probe may fail in any way; that is its answer
        return False
    return True


def _declaring(case: Case) -> Case:
    """The case on a card that declares it, with fp32 accumulation, so that a bound can be looked up."""
    row = case.target.card.capabilities[0]
    wide = row.model_copy(
        update={
            "ops": row.ops | {case.gemm},
            "recipes": row.recipes | {case.variant.kind},
            "device": case.target.device.kind,
            "framework": case.bridge.name,
            "in_dtypes": row.in_dtypes | {case.dtype},
            "out_dtypes": row.out_dtypes | {case.dtype},
            "accumulation": "fp32",
        }
    )
    card = case.target.card.model_copy(update={"capabilities": (wide,)})
    return replace(case, target=replace(case.target, card=card))


def test_nothing_works_undeclared(target: Target, rng: Rng, request: pytest.FixtureRequest) -> None:
    """Everything that the card does not declare is tried once; what works is an "undeclared capability" warning."""
    backend = _load(target)
    if backend is None:
        pytest.skip(f"the plugin of {target.name} cannot be loaded past the registry")
    working = []
    ignore: Measure = lambda name, value: None  # noqa: E731
    for case, needed in _probes(target):
        if isinstance(match(target.card, needed), str) and _works(case, needed, backend, rng, ignore):
            working.append(f"{needed.op} in {case.variant.kind} from {case.dtype}")
    if working:
        text = f"{target.name} serves what its card does not declare: {', '.join(working)}"
        undeclared(request.node.user_properties, text)
        warnings.warn(text, UndeclaredCapability, stacklevel=1)
