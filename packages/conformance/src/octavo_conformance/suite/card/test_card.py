"""What a card promises before anything runs."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from itertools import product

from octavo_conformance.cards.fused_variants import of_activations, of_norms
from octavo_conformance.cards.needs import Need
from octavo_conformance.cards.targets import Target
from octavo_conformance.cards.variants import RAGGED, RECIPES, QuantizerVariant, RecipeVariant
from octavo_conformance.problems.case import Case
from octavo_registry import API_LEVEL, strange_names
from octavo_registry.contract.cards import QUANTIZERS, BackendCard
from octavo_registry.dispatch.match import match

FRAMEWORKS = ("torch", "jax", "jaxlib", "tensorflow", "triton", "cupy", "mlx", "numpy", "ml_dtypes")

_PROBE = """
import json, sys
from importlib import metadata
before = set(sys.modules)
for point in metadata.entry_points(group="octavo.backends"):
    if point.dist is not None and point.dist.name == sys.argv[1]:
        point.load()
print(json.dumps(sorted({name.partition(".")[0] for name in set(sys.modules) - before})))
"""


def test_the_card_imports_no_framework(target: Target) -> None:
    """Importing the plugin module imports neither a framework nor numpy (architecture: cheap metadata, heavy code
    apart), so that a table of backends costs nothing."""
    run = subprocess.run(
        [sys.executable, "-c", _PROBE, target.distribution], capture_output=True, text=True, check=False, timeout=60
    )
    assert run.returncode == 0, run.stderr
    heavy = sorted(set(json.loads(run.stdout.splitlines()[-1])) & set(FRAMEWORKS))
    assert not heavy, f"the card of {target.name} imports {', '.join(heavy)}; move it behind octavo_load"


def test_the_card_is_plain_data(target: Target) -> None:
    """The card survives JSON, names an API level that this registry knows, and a distribution that is installed."""
    card, installed = target.card, metadata.version(target.distribution)
    assert BackendCard.model_validate_json(card.model_dump_json()) == card, f"JSON changes the card of {target.name}"
    assert card.api_level <= API_LEVEL, f"{target.name} has API level {card.api_level}, this registry {API_LEVEL}"
    assert installed == target.version, f"{target.distribution} is {target.version} here and {installed} installed"


def test_the_card_names_recipes_that_exist(target: Target) -> None:
    """A typing error in `recipes` would only mean that the recipe is not served, and nobody would be told."""
    wrong = strange_names(target.card)
    assert not wrong, "; ".join(wrong)


def test_something_declared_is_served_here(target: Target) -> None:
    """A backend whose machine refuses everything that its card declares would pass by skipping: that fails."""
    reasons = []
    for row in target.card.capabilities:
        if (row.framework, row.device) != (target.bridge.name, target.device.kind):
            continue
        for op, kind in product(sorted(row.ops), sorted(row.recipes)):
            case = _case(target, op, kind, sorted(row.in_dtypes)[0])
            if case is None:
                continue
            for request in case.requests():
                if isinstance(match(target.card, request), str):
                    continue
                reason = case.refusal_of(request)
                if reason is None:
                    return
                reasons.append(f"{op} in {kind}: {reason}")
    assert not reasons, "every declared capability is refused on this machine: " + "; ".join(reasons[:5])


def _case(target: Target, op: str, kind: str, dtype: str) -> Case | None:
    """A case of one operation and recipe kind; None for those that the suite has no definition of."""
    if op in ("quantize", "dequantize"):
        specs = [spec for spec in RAGGED.values() if spec.scaling == kind]
        variant = QuantizerVariant(kind, specs[0], dtype) if specs else None  # type: ignore[arg-type]
        return None if variant is None else Case(target, Need(op, lambda full: [variant], {}), variant)  # type: ignore[arg-type]
    fused = of_norms(True) if op == "norm_quantize" else of_activations(True) if op in QUANTIZERS else []
    after = next((variant for variant in fused if (variant.kind, variant.dtype) == (kind, dtype)), None)
    if after is not None:
        return Case(target, Need(op, lambda full: [after], {}), after)  # type: ignore[arg-type]
    recipes = [recipe for recipe in RECIPES.values() if recipe.kind == kind]
    if op not in ("fprop", "dgrad", "wgrad") or not recipes:
        return None
    of_gemm = RecipeVariant(kind, recipes[0], dtype, op)  # type: ignore[arg-type]
    return Case(target, Need("gemm", lambda full: [of_gemm], {}), of_gemm)
