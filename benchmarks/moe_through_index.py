"""A MoE layer whose x and dy are read from the tokens' rows, quantized there or multiplied, beside one that permutes
the rows first.

python benchmarks/moe_through_index.py OUTPUT COMMIT

The ways of one shape, recipe and form take turns in one process, on a CUDA device. The others are backends with the
same kernels: one offers neither `BoundQuantize.of_tokens` nor GEMMs that take tokens; one, in block scaling, no GEMMs
that take codes of tokens, so that codes are those of rows, and one such GEMMs of any width; one, in MXFP8 and NVFP4,
no quantizers that write what its GEMMs multiply (`BoundQuantize.multiplied`), so that GEMMs make that of codes; and
one, in bf16, no activations without codes (`BoundActQuantize.values`), so that a quantizer's kernels make them and its
codes are thrown away. Layers of more tokens are measured in block scaling alone.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from moe_forms import SHAPES, draw, measure, step_times
from torch import Tensor

import octavo
import octavo_registry
import octavo_torch as ot
from octavo_native.gathering import GATHERED_BESIDE
from octavo_registry.contract import (
    AnyBound,
    AnyRequest,
    Backend,
    BackendCard,
    BoundActQuantize,
    BoundDactQuantize,
    BoundDgrad,
    BoundFprop,
    BoundQuantize,
    BoundWgrad,
    GemmRequest,
    hookimpl,
)
from octavo_torch_native.backend import NativeBackend
from octavo_torch_native.plugin import CARD

VALUES_IN_WGRAD = "fp8-block, wgrad in bf16"
BLOCK = ("fp8-block", VALUES_IN_WGRAD)
KINDS = ("bf16", *BLOCK, "fp8-current", "fp8-row", "mxfp8", "nvfp4")
MORE_TOKENS = {
    "Qwen3-30B, 32768 tokens": ot.MoeShape(32768, 8, 128, 2048, 768),
    "8 choices of experts of 1024": ot.MoeShape(32768, 8, 128, 4096, 1024),
    "Qwen3-235B, 16 of 128 experts": ot.MoeShape(16384, 8, 16, 4096, 1536),
    "DSv3, 32 of 256 experts, 16384 tokens": ot.MoeShape(16384, 8, 32, 7168, 2048),
}
ALL_SHAPES = SHAPES | MORE_TOKENS
TURNS, WARM = 20, 4
NATIVE, PERMUTING, QUANTIZING, ROWS = "torch-native", "permuting", "codes-between", "codes-of-rows"
ANY_WIDTH, CODES = "codes-of-tokens", "codes-alone"
OTHERS = PERMUTING, QUANTIZING, ROWS, ANY_WIDTH, CODES
PEERS = {"bf16": (QUANTIZING,), "mxfp8": (CODES,), "nvfp4": (CODES,)} | dict.fromkeys(BLOCK, (ROWS, ANY_WIDTH))
"""Those besides PERMUTING, by recipe."""


class Poorer(Backend):
    """torch-native, which here takes rows alone, or codes of tokens whatever they cost, or has no activations without
    codes, or no planes in the place of codes."""

    def __init__(self, name: str) -> None:
        self._native, self._name = NativeBackend(), name

    def refuses(self, request: AnyRequest) -> str | None:
        """What torch-native refuses."""
        return self._native.refuses(request)

    def bind(self, request: AnyRequest) -> AnyBound:
        """torch-native's function, without what this backend lacks or judges otherwise."""
        bound = self._native.bind(request)
        if self._name == CODES:
            quantizes = isinstance(bound, BoundQuantize | BoundActQuantize | BoundDactQuantize)
            return replace(bound, multiplied=None) if quantizes else bound
        if self._name == QUANTIZING:
            return replace(bound, values=None) if isinstance(bound, BoundActQuantize | BoundDactQuantize) else bound
        if isinstance(bound, BoundFprop | BoundDgrad | BoundWgrad):
            if self._name == PERMUTING:
                return replace(bound, takes_tokens=())
            assert isinstance(request, GemmRequest)
            if not request.recipe.quantizes(request.op):
                return bound
            rows = ("x",) if request.op == "fprop" else ("dy",) if request.op == "dgrad" else ()
            return replace(bound, takes_tokens=rows if self._name == ANY_WIDTH else ())
        return without_tokens(bound) if self._name == PERMUTING and isinstance(bound, BoundQuantize) else bound


def without_tokens(bound: BoundQuantize[Tensor, Any]) -> BoundQuantize[Tensor, Any]:
    """A quantizer that takes rows alone, in each of its answers."""
    multiplied = bound.multiplied
    if multiplied is not None:
        bound = replace(bound, multiplied=lambda directions: without_tokens(multiplied(directions)))
    return replace(bound, of_tokens=None)


class Plugin:
    """The plugin of `Poorer`."""

    @hookimpl
    def octavo_backends(self) -> Iterable[BackendCard]:
        """torch-native's card, named and ranked behind it."""
        return tuple(CARD.model_copy(update={"name": name, "priority": CARD.priority - 1}) for name in OTHERS)

    @hookimpl
    def octavo_load(self, name: str) -> Backend | None:
        """The backend."""
        return Poorer(name) if name in OTHERS else None


def predicted(shape: ot.MoeShape, kind: str, form: str) -> dict[str, float]:
    """MB that nobody writes and reads any more: x's and dy's rows in bf16, once for each pass that would make them.

    moved   by permutations: a token's row is read, and written once for each choice
    read    by quantizers and products, whose rows now come out of the L2 cache but for the first choice of a token
    """
    tokens, rows = shape.tokens * shape.in_features * 2, shape.tokens * shape.k * shape.in_features * 2
    passes = 2 if form == "keep_all" else 3
    if kind in ("bf16", VALUES_IN_WGRAD):
        # of x in backward, where fc1's weights are not too wide to be multiplied by gathered rows
        gathered = 2 * shape.hidden_features <= GATHERED_BESIDE
        passes = (2 if gathered else 1) if form == "keep_all" else 3 if gathered else 2
    return {"moved": passes * (tokens + rows) / 1e6, "read": passes * (rows - tokens) / 1e6}


def rows_of(label: str, kind: str, form: str, given: dict[str, Tensor], dy: Tensor) -> list[dict[str, Any]]:
    """All ways of one shape, recipe and form."""
    shape = ALL_SHAPES[label]
    recipe = octavo.BlockScaling(wgrad="high_precision") if kind == VALUES_IN_WGRAD else octavo.recipe(kind)
    how: dict[str, Any] = {"recipe": recipe, "form": form} | ({"seed": 1} if recipe.stochastic else {})
    leaves = [given[name] for name in ("x", "weights", "w1", "w2")]
    names = (PERMUTING, *PEERS.get(kind, ()), NATIVE)
    ways = {name: partial(ot.moe_mlp, **given, backend=name, **how) for name in names}
    rows: dict[str, dict[str, Any]] = {name: {} for name in ways}
    results = []
    for name, call in ways.items():
        seen, result = measure(call, leaves, dy)
        results.append(result)
        rows[name]["peak_bytes"] = seen["peak_bytes"]
    same = all(
        torch.equal(one, other) for other_way in results[1:] for one, other in zip(results[0], other_way, strict=True)
    )
    del results, result
    measured = step_times({name: (call, leaves) for name, call in ways.items()}, dy, TURNS, WARM)
    for name, times in measured.items():
        rows[name] |= times
    permuted, through = rows[PERMUTING]["step_ms"], rows[NATIVE]["step_ms"]
    more = {"same_bits": same, "predicted_mb": predicted(shape, kind, form), "saved": 1 - through / permuted}
    if ROWS in rows:
        more["saved_without_codes_of_rows"] = 1 - through / rows[ROWS]["step_ms"]
        more["saved_by_codes_of_tokens"] = 1 - rows[ANY_WIDTH]["step_ms"] / rows[ROWS]["step_ms"]
    if CODES in rows:
        more["saved_by_values"] = 1 - through / rows[CODES]["step_ms"]
    if QUANTIZING in rows:
        more["saved_without_codes"] = 1 - through / rows[QUANTIZING]["step_ms"]
    print(
        f"{label:38}{kind:26}{form:10}{permuted:8.3f}{through:8.3f} ms {100 * more['saved']:6.1f} % {same}", flush=True
    )
    return [
        {"shape": label, "recipe": kind, "form": form, "way": name, **row, **(more if name == NATIVE else {})}
        for name, row in rows.items()
    ]


def main() -> None:
    """Writes OUTPUT after every recipe."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("commit")
    arguments = parser.parse_args()
    octavo_registry.register(Plugin(), "permuting-plugin")
    record: dict[str, Any] = {
        "command": f"python benchmarks/moe_through_index.py moe.json {arguments.commit}",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": {"gpu": torch.cuda.get_device_name()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "octavo-torch": ot.__version__},
        "commit": arguments.commit,
        "shapes": {label: vars(shape) for label, shape in ALL_SHAPES.items()},
        "rows": [],
    }
    for label, shape in ALL_SHAPES.items():
        given, _ = draw(shape, octavo.recipe("bf16"))
        dy = torch.randn(shape.tokens, shape.in_features, device="cuda").bfloat16()
        for kind in BLOCK if label in MORE_TOKENS else KINDS:
            for form in ("standard",) if label in MORE_TOKENS else ("standard", "keep_all"):
                record["rows"] += rows_of(label, kind, form, given, dy)
            torch.cuda.empty_cache()
            arguments.output.write_text(json.dumps(record, indent=1) + "\n")
        del given, dy


if __name__ == "__main__":
    main()
