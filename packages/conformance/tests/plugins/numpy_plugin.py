"""Cards of the honest numpy backend and of one backend a fault."""

from __future__ import annotations

from octavo_registry.contract.cards import ALL_DTYPES, OPTIMIZERS, QUANTIZERS, BackendCard, Capability

KINDS = frozenset({"high_precision", "delayed", "current", "row", "block", "mxfp8", "nvfp4"})

FAULTS = (
    "half-away",
    "drops-tail",
    "empty-shift",
    "no-bias",
    "leaks-tail",
    "syncs",
    "floor-e8m0",
    "no-saturation",
    "stale-tile",
    "truncates",
    "varies",
    "empty-dw",
    "no-group-offset",
    "flushes",
    "no-accumulate",
    "uses-out",
    "wrong-column-scale",
    "reads-payload-tail",
    "one-seed",
    "unrounded",
    "no-probs",
    "other-values",
    "other-forward",
    "tail-in-dbias",
    "no-epsilon",
    "sees-batch",
    "undeclared",
    "tf32",
    "up-first",
    "amax-without-nan",
    "always-written",
    "gaps-written",
    "writes-x",
    "writes-codes",
    "writes-sizes",
    "amax-of-tail",
    "narrow-sizes",
    "one-plane",
    "needs-rows",
    "adds-fp32",
    "returns-alone",
    "fused-offset",
    "swallows-nan",
    "unpromoted",
    "log2-e8m0",
    "never-skips",
    "short-seed",
    "all-from-row-0",
    "scale-of-a-neighbour",
    "transposed-scales",
    "clamps",
    "other-plane",
    "records-nan",
    "infinite-scales",
    "stale-weights",
    "unnumbered",
    "truncated-values",
    "truncated-when-fused",
    "needs-both-planes",
    "loses-codes-beside",
    "other-codes",
    "tokens-for-choices",
    "one-buffer",
    "stale-codes",
    "no-result",
    "high-nibble-first",
    "other-spec",
    "other-sizes",
    "writes-fused",
    "unwanted",
    "writes-before",
    "writes-behind",
)

ONE_RECIPE = {
    "numpy-honest-block": "block",
    "numpy-honest-row": "row",
    "numpy-no-accumulate-block": "block",
    "numpy-no-scales-row": "row",
}
"""Backends of one recipe, which the quick selection has in few of its tests; that with an honest "row" is of bf16."""


def card(name: str) -> BackendCard:
    """The whole support table; "numpy-undeclared" keeps NVFP4 to itself, "numpy-sees-batch" promises what numpy's BLAS
    does not, and "numpy-unpromoted" sums as Hopper does, with one recipe whose scales cover a whole sum."""
    recipes = KINDS - {"nvfp4"} if name == "numpy-undeclared" else KINDS
    one = {**ONE_RECIPE, "numpy-unpromoted": "row"}
    recipes = frozenset({one[name]}) if name in one else recipes
    row = Capability(
        square_columns=True,
        ops=QUANTIZERS | {"dequantize", "fprop", "dgrad", "wgrad"},
        recipes=recipes,
        framework="numpy",
        device="cpu",
        in_dtypes=frozenset({"bfloat16"}) if name == "numpy-honest-row" else ALL_DTYPES,
        graph_safe=True,
        weights=frozenset({"nk", "kn"}),
        batch_invariant=name == "numpy-sees-batch",
        accumulation="hopper_fp8" if name == "numpy-unpromoted" else "fp32",
    )
    masters = frozenset({"float32", "bfloat16"})
    step = row.model_copy(update={"ops": OPTIMIZERS, "recipes": frozenset({"high_precision"}), "out_dtypes": masters})
    return BackendCard(name=name, api_level=5, capabilities=(row,) if name in one else (row, step))


def octavo_backends() -> list[BackendCard]:
    """The honest one, then the wrong ones."""
    return [card(name) for name in (*(f"numpy-{name}" for name in ("honest", *FAULTS)), *ONE_RECIPE)]


def octavo_load(name: str) -> object | None:
    """The backend with the fault that its name says."""
    fault = name.removeprefix("numpy-")
    if name in ONE_RECIPE:
        fault = fault.removesuffix(f"-{ONE_RECIPE[name]}")
    if fault not in ("honest", "no-scales", *FAULTS):
        return None
    from numpy_backend import NumpyBackend

    return NumpyBackend() if fault == "honest" else NumpyBackend(fault)
