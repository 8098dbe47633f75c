"""The work of `octavo bench tiles`: octavo-native's GEMMs called with each tile in turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import octavo_native
from octavo.quantizer import QuantizerSpec
from octavo.recipe_base import Gemm
from octavo_bench.harness.engine.torch import TorchEngine
from octavo_bench.harness.problem import SIDES, Prepared, draw, layer_plan
from octavo_bench.harness.recipes import GemmCase
from octavo_bench.harness.results import Failure, facts_of, told
from octavo_bench.harness.shapes import Shape, sizes_of
from octavo_bench.harness.timing import Call
from octavo_bench.tiles.row import Sweep, TileRow, TilesResults
from octavo_native.gemms import TileChoice, gemm_choices, gemm_named, names_of

BACKEND = "torch-native"
H200_SMS = 132


@dataclass(frozen=True, slots=True)
class Choices:
    """What the command line asked for, checked."""

    device: str
    shapes: tuple[Shape, ...]
    sizes: tuple[str, ...]
    kinds: tuple[str, ...]
    gemms: tuple[Gemm, ...]
    repeats: int
    seed: int


def bench_tiles(choices: Choices, command: str, say: Callable[[str], None]) -> TilesResults:
    """Run everything; `say` hears where it is. A sweep that fails is kept as a `Failure`, and the others go on."""
    start = time.perf_counter()
    engine = TorchEngine(choices.device)
    sms = torch.cuda.get_device_properties(0).multi_processor_count if engine.cuda else H200_SMS
    sweeps: list[Sweep] = []
    failures: list[Failure] = []
    groupings: dict[str, list[int]] = {}
    for shape in choices.shapes:
        data = draw(engine, shape, choices.seed)
        for name in choices.sizes:
            sizes = sizes_of(shape, name, choices.seed).sizes
            say(f"{shape.label}, {name} ...")
            groupings[f"{shape.label}, {name}"] = list(sizes)
            for kind in choices.kinds:
                case = GemmCase(kind, "fprop")
                try:
                    plan = layer_plan(engine, shape, case.recipe, (BACKEND,))
                    prepared = Prepared(engine, data, sizes, plan)
                    sweeps += [
                        _sweep(engine, prepared, GemmCase(kind, gemm), name, sizes, sms, choices.repeats)
                        for gemm in choices.gemms
                    ]
                except Exception as error:  # the other sweeps are worth having; the command fails at its end
                    failures.append(Failure(kind, shape.key, name, told(error)))
        del data
        engine.release()
    return TilesResults(
        **facts_of(choices, command, start),
        groupings=groupings,
        sweeps=sweeps,
        failures=failures,
    )


def _sweep(
    engine: TorchEngine,
    prepared: Prepared,
    case: GemmCase,
    name: str,
    sizes: tuple[int, ...],
    sms: int,
    repeats: int,
) -> Sweep:
    shape = prepared.shape
    problem = {"rows": shape.rows, "n": shape.n, "k": shape.k, "groups": shape.groups}
    gemm = native_gemm(prepared, case)
    rows = []
    expected: Tensor | None = None
    for choice in gemm_choices(gemm, **problem, sms=sms):
        results, calls = tile_calls(engine, prepared, case, gemm, choice, sizes)
        times = engine.times(calls, repeats)
        calls[0]()
        expected = results[0] if expected is None else expected
        rows.append(TileRow(choice.name, choice.microseconds, choice.filled, choice.waves, choice.chosen, times,
                            difference(results[0], expected)))  # fmt: skip
    return Sweep(shape, name, case, tuple(rows))


def native_gemm(prepared: Prepared, case: GemmCase) -> octavo_native.Gemm:
    """The native GEMM of a case."""
    specs = [_spec(prepared, case.gemm, side) for side in (0, 1)]
    left, right = specs
    if left is None or right is None:
        return gemm_named(gemm=case.gemm, out_dtype=case.out_dtype, accumulate=case.accumulate)
    return gemm_named(
        gemm=case.gemm,
        **names_of(case.gemm, left, right),
        out_dtype=case.out_dtype,
        accumulate=case.accumulate,
        fast_accumulation=case.fast,
    )


def tile_calls(
    engine: TorchEngine,
    prepared: Prepared,
    case: GemmCase,
    gemm: octavo_native.Gemm,
    choice: TileChoice,
    sizes: tuple[int, ...],
) -> tuple[list[Tensor], list[Call]]:
    """Results and the calls that write them with one tile, a pair a set of buffers."""
    import octavo_torch_native

    shape = prepared.shape
    problem: dict[str, Any] = {"cuda": engine.cuda, "rows": shape.rows, "n": shape.n, "k": shape.k}
    problem |= {"groups": shape.groups}
    needed = gemm.workspace_bytes(**problem, tile=choice.tile)
    workspace = torch.empty(needed, dtype=torch.uint8, device=engine.device)
    group_sizes = engine.array(list(sizes), "int64")
    plan = octavo_torch_native.index_groups(group_sizes, shape.rows, group_sizes)
    results, calls = [], []
    for held in prepared.operands:
        out = engine.full(prepared.out_shape(case.gemm), case.out_dtype, torch.nan)
        arguments = {
            **problem,
            **_addresses("left", held, case.gemm, 0),
            **_addresses("right", held, case.gemm, 1),
            "plan": plan.words.data_ptr(),
            "out": out.data_ptr(),
            "tile": choice.tile,
            "workspace": workspace.data_ptr() if needed else 0,
            "workspace_bytes": needed,
        }
        results.append(out)
        calls.append(_call(engine, gemm, arguments, (workspace, plan, held, out)))
    return results, calls


def _call(engine: TorchEngine, gemm: octavo_native.Gemm, arguments: dict[str, Any], kept: tuple[Any, ...]) -> Call:
    """`kept` holds what the addresses point to."""

    def call(_kept: tuple[Any, ...] = kept) -> None:
        gemm.run(**arguments, stream=torch.cuda.current_stream().cuda_stream if engine.cuda else 0)

    return call


def _addresses(side: str, held: dict[Any, Any], gemm: Gemm, at: int) -> dict[str, int]:
    operand, direction = SIDES[gemm][at]
    value = held[operand]
    if isinstance(value, Tensor):
        return {side: value.data_ptr()}
    codes, scales, factor = value.plane(direction)
    return {
        side: codes.data_ptr(),
        f"{side}_scales": scales.data_ptr(),
        f"{side}_global": 0 if factor is None else factor.data_ptr(),
    }


def _spec(prepared: Prepared, gemm: Gemm, side: int) -> QuantizerSpec | None:
    operand, _ = SIDES[gemm][side]
    plan = getattr(prepared.plan, f"quantize_{operand}")
    return None if plan is None else plan.request.quantizer


def difference(result: Tensor, expected: Tensor) -> float:
    """The norm of what differs over that of what is expected; infinite where something is not a number."""
    if result is expected or torch.equal(result, expected):
        return 0.0
    worst = torch.linalg.vector_norm(result - expected, dtype=torch.float32)
    share = float(worst / torch.linalg.vector_norm(expected, dtype=torch.float32))
    return share if share == share else float("inf")
