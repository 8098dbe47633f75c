"""The cards: what torch-triton can do, and where. Octavo reads them in every process, so nothing heavy is imported."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from octavo_registry.contract import BackendCard, Capability, hookimpl

if TYPE_CHECKING:
    from octavo_registry.contract import Arch, Backend, Op, Weight

NAME = "torch-triton"
INTERPRETER = "torch-triton-interpreter"

_QUANTIZERS: frozenset[Op] = frozenset({"quantize", "dequantize"})
_GEMMS: frozenset[Op] = frozenset({"fprop", "dgrad", "wgrad"})
_MOVES: frozenset[Op] = frozenset({"permute_rows", "combine_rows", "dot_rows"})
_WEIGHTS: frozenset[Weight] = frozenset({"nk", "kn"})
_HIGH_PRECISION = frozenset({"high_precision"})
_CODED = frozenset({"delayed", "current", "row", "block"})
_BLOCKED = frozenset({"mxfp8", "nvfp4"})
_ALL = _CODED | _BLOCKED
_LAYOUTS = frozenset({"plain", "turned"})
"""See quantizers.planes."""
_RUN: frozenset[Arch] = frozenset({(9, 0)})
"""Where the conformance suite has passed: on an H200."""


def _row(ops: frozenset[Op], recipes: frozenset[str], device: str, **conditions: Any) -> Capability:
    if ops == _GEMMS:
        conditions["weights"] = _WEIGHTS
    return Capability(ops=ops, recipes=recipes, framework="torch", device=device, **conditions)


def _on_gpus() -> Iterable[Capability]:
    spans: tuple[tuple[Arch, Arch, str], ...] = (
        ((8, 0), (8, 8), "fp16 products of FP8 codes"),
        ((8, 9), (8, 9), ""),
        ((9, 0), (9, 0), ""),
        ((10, 0), (10, 9), ""),
        ((12, 0), (12, 9), ""),
    )
    for least, most, codes in spans:
        compiled = f"compiled for sm_{least[0]}{least[1]}, its results checked in Triton's interpreter alone"
        for where in ({"sizes": frozenset({"device"}), "graph_safe": True}, {"sizes": frozenset({"host"})}):
            seen = None if least in _RUN else compiled
            on: dict[str, Any] = {"device": "cuda", "min_arch": least, "max_arch": most, "untried": seen, **where}
            yield _row(_QUANTIZERS, _CODED, layouts=_LAYOUTS, **on)
            yield _row(_QUANTIZERS, _BLOCKED, **on)
            yield _row(_GEMMS, _HIGH_PRECISION, accumulation="hopper_bf16", **on)
            promoted = "hopper_bf16" if codes else "hopper_fp8_promoted"
            yield _row(_GEMMS, _CODED, accumulation=promoted, emulated=codes or None, **on)
            if least[0] == 10:
                yield _row(_GEMMS, frozenset({"mxfp8"}), accumulation="hopper_fp8_promoted", **on)
                # the interpreter takes every block scale for an E8M0 one
                on["untried"] = "compiled for sm_100, its results checked by nothing"
                yield _row(_GEMMS, frozenset({"nvfp4"}), accumulation="hopper_fp8_promoted", **on)
            else:
                copies = "bf16 products of exact dequantized copies"
                yield _row(_GEMMS, _BLOCKED, accumulation="hopper_bf16", emulated=copies, **on)
        seen = None if least in _RUN else compiled
        # these take no sizes
        yield _row(_MOVES, _HIGH_PRECISION, "cuda", min_arch=least, max_arch=most, untried=seen, graph_safe=True)


CARD = BackendCard(
    name=NAME,
    api_level=5,
    priority=0,
    needs=("torch>=2.11", "triton>=3.6"),
    summary="Grouped quantization, GEMMs and moved rows in Triton, for NVIDIA GPUs from sm_80 on.",
    capabilities=tuple(_on_gpus()),
)

INTERPRETER_CARD = BackendCard(
    name=INTERPRETER,
    api_level=5,
    # below the reference backend's: it is for tests of the kernels, and serves those who name it
    priority=-200,
    needs=("torch>=2.11", "triton>=3.6"),
    summary="torch-triton's kernels on a CPU, where Triton interprets them (TRITON_INTERPRET=1): for tests.",
    capabilities=(
        _row(_QUANTIZERS, _CODED, "cpu", layouts=_LAYOUTS),
        _row(_QUANTIZERS, _BLOCKED, "cpu"),
        _row(_GEMMS, _ALL | _HIGH_PRECISION, "cpu"),
        _row(_MOVES, _HIGH_PRECISION, "cpu"),
    ),
)


@hookimpl
def octavo_backends() -> Iterable[BackendCard]:
    """The backend, and its kernels in Triton's interpreter."""
    return (CARD, INTERPRETER_CARD)


@hookimpl
def octavo_load(name: str) -> Backend | None:
    """Either backend; imports torch and Triton."""
    if name not in (NAME, INTERPRETER):
        return None
    from octavo_torch_triton.backend import TritonBackend

    return TritonBackend(name)
