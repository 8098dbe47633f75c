"""What a card declares on a device, and which tests the quick selection needs besides its own to have tried it all.

A suite that skips what a backend refuses would pass a backend that refuses everything. So whatever a card declares has
to have run once, or the run fails with the reason (`uncovered`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, get_args

from octavo.quantizer import Operand
from octavo.recipe_base import GEMMS, Gemm
from octavo_conformance.cards import selections, variants
from octavo_conformance.cards.fused_variants import of_activations, of_gradients, of_norms
from octavo_conformance.cards.needs import Need
from octavo_conformance.cards.targets import Target
from octavo_conformance.cards.variants import FusedVariant, QuantizerVariant, RecipeVariant, Variant
from octavo_registry.contract.cards import MOVES, OPTIMIZERS, QUANTIZERS, ROUTERS, Capability

ANY = "any dtype"
"""Stands for the dtype of "dequantize", whose input is codes."""

_DTYPES = ("bfloat16", "float32", "float16")
_FUSED = {"act_quantize": of_activations, "dact_quantize": of_gradients, "norm_quantize": of_norms}
_QUANTIZERS = {
    "delayed": "delayed.e4m3",
    "current": "current.e4m3",
    "row": "row.e4m3.pow2",
    "block": "block.e4m3.pow2",
    "mxfp8": "mxfp8.e4m3",
    "nvfp4": "nvfp4",
}
"""The quantizer of each scaling that stands for it."""


@dataclass(frozen=True, slots=True, order=True)
class Declared:
    """One operation in one recipe kind from one dtype."""

    op: str
    recipe: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.op} in {self.recipe} from {self.dtype}"


def declared(target: Target) -> list[Declared]:
    """What the card promises on this device and the suite has a definition of, in order of the card's operations."""
    found: set[Declared] = set()
    for row in target.card.capabilities:
        if (row.framework, row.device) == (target.bridge.name, target.device.kind) and _is_for(row, target):
            found |= set(_of_row(row))
    return sorted(found)


def unknown_recipes(target: Target) -> list[str]:
    """Recipe kinds of the card that the suite has no definition of: a plugin's own."""
    kinds = {kind for row in target.card.capabilities for kind in row.recipes}
    return sorted(kinds - {recipe.kind for recipe in variants.RECIPES.values()})


def _is_for(row: Capability, target: Target) -> bool:
    if row.min_arch is None and row.max_arch is None:
        return True
    arch = target.device.arch
    return arch is not None and (row.min_arch or arch) <= arch <= (row.max_arch or arch)


def _of_row(row: Capability) -> Iterator[Declared]:
    for op, recipe in product(row.ops, row.recipes):
        if recipe not in {known.kind for known in variants.RECIPES.values()}:
            continue
        if recipe == "high_precision" and (op in QUANTIZERS or op == "dequantize"):
            continue  # nothing to quantize
        if op in MOVES | ROUTERS | OPTIMIZERS and recipe != "high_precision":
            continue  # no recipe is asked for by a router, when rows move, and where an optimizer writes no codes
        if op == "dequantize":
            yield Declared(op, recipe, ANY)
            continue
        # the suite asks a GEMM for results in the dtype of its operands
        dtypes = row.in_dtypes if op in QUANTIZERS else row.in_dtypes & row.out_dtypes
        yield from (Declared(op, recipe, dtype) for dtype in dtypes or row.in_dtypes)


def required(target: Target, full: bool) -> list[tuple[Declared, ...]]:
    """Sets of which at least one member has to have run.

    In a full run each operation in each recipe from each dtype; in a quick one each operation in each recipe from some
    dtype, and from each dtype in some recipe; products in high precision from each, because what they multiply are the
    values themselves.
    """
    everything = declared(target)
    if full:
        return [(one,) for one in everything]
    by_recipe = {(one.op, one.recipe): tuple(o for o in everything if (o.op, o.recipe) == (one.op, one.recipe))
                 for one in everything}  # fmt: skip
    by_dtype = {(one.op, one.dtype): tuple(o for o in everything if (o.op, o.dtype) == (one.op, one.dtype))
                for one in everything}  # fmt: skip
    as_they_are = [(one,) for one in everything if one.op in GEMMS and one.recipe == "high_precision"]
    return [*as_they_are, *by_recipe.values(), *by_dtype.values()]


def stand_ins(target: Target, need: Need, full: bool) -> list[Variant]:
    """The variants of a test; where the card declares none of a GEMM's, of rows or of weights, others that it declares.

    The selection names a recipe or a dtype to save time, and a backend that has neither is tested like any other: in
    another dtype, or in the first recipe of the full selection that its card has.
    """
    known = set(declared(target))
    of_form: dict[Gemm | bool | None, list[Variant]] = {}
    for variant in need.over(full):
        of_form.setdefault(_form(variant), []).append(variant)
    found: list[Variant] = []
    for form, own in of_form.items():
        if any(_needed(need, variant) <= known for variant in own):
            found += own
            continue
        wider = sorted((v for v in need.over(True) if _form(v) == form), key=lambda v: v.kind == "high_precision")
        found += _in_other_dtypes(known, need, own) or _in_other_dtypes(known, need, wider)[:1] or own
    return found


def _form(variant: Variant) -> Gemm | bool | None:
    """What one variant cannot stand for in another: its GEMM, or whether a quantizer has weights or rows."""
    return variant.gemm if isinstance(variant, RecipeVariant) else variant.stacked


def _in_other_dtypes(known: set[Declared], need: Need, of: list[Variant]) -> list[Variant]:
    """Those that the card declares in their own dtype, else in the first other one in which it declares any."""
    in_own = [variant for variant in of if _needed(need, variant) <= known]
    for dtype in variants.DTYPES if not in_own else ():
        others = dict.fromkeys(replace(variant, dtype=dtype) for variant in of)
        in_own = [variant for variant in others if _needed(need, variant) <= known]
        if in_own:
            break
    return in_own


def _needed(need: Need, variant: Variant) -> set[Declared]:
    """What has to be declared for a test of the variant to run."""
    if isinstance(variant, RecipeVariant) and need.op in ("gemm", "layer"):
        gemms = GEMMS if variant.gemm is None else (variant.gemm,)
        needed = {Declared(gemm, variant.recipe.for_gemm(gemm).kind, variant.dtype) for gemm in gemms}
        if variant.gemm is None:
            specs = [variant.recipe.quantizer(operand) for operand in get_args(Operand)]
            needed |= {Declared("quantize", spec.scaling, variant.dtype) for spec in specs if spec is not None}
        return needed
    return {Declared(need.op, variant.kind, ANY if need.op == "dequantize" else variant.dtype)}


def rest(target: Target, op: str, full: bool) -> list[Variant]:
    """Variants of `op` ("gemm" stands for all three) that no test of the selection has, and that `required` needs."""
    ops = GEMMS if op == "gemm" else (op,)
    covered = {Declared(*key) for key in _selected(full)}
    chosen: list[Declared] = []
    for members in required(target, full):
        if members[0].op in ops and not covered & set(members):
            best = min(members, key=lambda one: _DTYPES.index(one.dtype) if one.dtype in _DTYPES else 0)
            chosen.append(best)
            covered.add(best)
    return [_variant(one) for one in chosen]


def _selected(full: bool) -> Iterator[tuple[str, str, str]]:
    """What the selection has whatever the card says."""
    for quantizer in (*selections.ragged(full), *selections.narrow(full)):
        yield "quantize", quantizer.kind, quantizer.dtype
    for gemm in selections.gemms(full):
        yield str(gemm.gemm), gemm.kind, gemm.dtype
    for op, over in _FUSED.items():
        for fused in over(full):
            yield op, fused.kind, fused.dtype
    for op, dtype in product(MOVES | ROUTERS | OPTIMIZERS, _DTYPES):
        yield op, "high_precision", dtype
    for quantizer in selections.one_per_scaling(full):
        yield "dequantize", quantizer.kind, ANY


def _variant(one: Declared) -> Variant:
    dtype: Any = one.dtype
    if one.op in GEMMS:
        name = next(name for name, recipe in variants.RECIPES.items() if recipe.kind == one.recipe)
        return RecipeVariant(name, variants.RECIPES[name], dtype, one.op)
    name = _QUANTIZERS[one.recipe]
    if one.op in _FUSED:
        function = "rms" if one.op == "norm_quantize" else "swiglu"
        return FusedVariant(name, variants.RAGGED[name], dtype, function=function)
    return QuantizerVariant(name, variants.RAGGED[name], dtype)


@dataclass(frozen=True, slots=True)
class Ran:
    """What became of one test: the capability that it is about, whether it ran, and why it did not."""

    capability: Declared
    ran: bool
    reason: str


def uncovered(target: Target, full: bool, tests: Iterable[Ran]) -> list[tuple[tuple[Declared, ...], str]]:
    """Declared capabilities of which no test ran, with the commonest reason."""
    known = list(tests)
    ran = {test.capability for test in known if test.ran}
    missing: dict[str, tuple[tuple[Declared, ...], str]] = {}
    for members in required(target, full):
        if ran & set(members) or set(members) <= {one for others, _ in missing.values() for one in others}:
            continue
        about = [test.reason for test in known if test.capability in members]
        reason = Counter(about).most_common(1)[0][0] if about else "no test of the suite asks for it"
        missing.setdefault(words(members), (members, reason))
    return list(missing.values())


def words(members: tuple[Declared, ...]) -> str:
    """`fprop in block`, `fprop from float16`, or all three."""
    if len(members) == 1:
        return str(members[0])
    op, recipes, dtypes = members[0].op, {one.recipe for one in members}, {one.dtype for one in members}
    return f"{op} in {members[0].recipe}" if len(recipes) == 1 else f"{op} from {members[0].dtype}" if dtypes else op
