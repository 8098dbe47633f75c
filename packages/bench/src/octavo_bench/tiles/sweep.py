"""The work of `octavo bench tiles`: octavo-native's GEMMs called with each tile in turn."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import octavo_native
from octavo.quantizer import QuantizerSpec
from octavo.recipe_base import Gemm
from octavo_bench.harness.engine.torch import TorchEngine
from octavo_bench.harness.problem import SIDES, Data, Prepared, draw, layer_plan
from octavo_bench.harness.recipes import GemmCase, gemms_of_recipe, recipe_of
from octavo_bench.harness.run import Run, problems
from octavo_bench.harness.timing import Call
from octavo_bench.tiles.benchmark import Sweep, TilesOptions, TileTime
from octavo_native.gemms import TileChoice, gemm_choices, gemm_named, names_of

BACKEND = "torch-native"
H200_SMS = 132


def sweeps(run: Run[TilesOptions]) -> Iterator[Sweep]:
    """A sweep for each GEMM of each kind, shape and vector of sizes."""
    options = run.options
    engine = TorchEngine(options.chosen_device)
    sms = torch.cuda.get_device_properties(0).multi_processor_count if engine.cuda else H200_SMS
    for shape, name, sizes in problems(run):
        data = draw(engine, shape, options.chosen_seed)
        for kind in options.chosen_kinds:
            prepare = partial(_prepared, engine, data, sizes, kind)
            for prepared in run.attempt(prepare, shape, name, kind, "operands"):
                for gemm in gemms_of_recipe(kind, options.gemms):
                    make = partial(_sweep, prepared, GemmCase(kind, gemm), (name, sizes), sms, options.chosen_repeats)
                    yield from run.attempt(make, shape, name, kind, gemm)
        del data
        engine.release()


def _prepared(engine: TorchEngine, data: Data, sizes: tuple[int, ...], kind: str) -> Prepared:
    return Prepared(engine, data, sizes, layer_plan(engine, data.shape, recipe_of(kind), (BACKEND,)))


def _sweep(prepared: Prepared, case: GemmCase, grouping: tuple[str, tuple[int, ...]], sms: int, repeats: int) -> Sweep:
    shape, (name, sizes) = prepared.shape, grouping
    problem = {"rows": shape.rows, "n": shape.n, "k": shape.k, "groups": shape.groups}
    gemm = native_gemm(prepared, case)
    tiles = []
    expected: Tensor | None = None
    for choice in gemm_choices(gemm, **problem, sms=sms):
        results, calls = tile_calls(prepared, case, gemm, choice, sizes)
        times = prepared.engine.times(calls, repeats)
        calls[0]()
        expected = results[0] if expected is None else expected
        apart = difference(results[0], expected)
        tiles.append(
            TileTime(choice.name, choice.microseconds, choice.filled, choice.waves, choice.chosen, times, apart)
        )
    return Sweep(shape, name, case, tuple(tiles))


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
    prepared: Prepared, case: GemmCase, gemm: octavo_native.Gemm, choice: TileChoice, sizes: tuple[int, ...]
) -> tuple[list[Tensor], list[Call]]:
    """Results and the calls that write them with one tile, a pair per set of buffers."""
    import octavo_torch_native

    engine, shape = prepared.engine, prepared.shape
    cuda = engine.device == "cuda"
    problem: dict[str, Any] = {"cuda": cuda, "rows": shape.rows, "n": shape.n, "k": shape.k}
    problem |= {"groups": shape.groups}
    needed = gemm.workspace_bytes(**problem, tile=choice.tile)
    workspace = torch.empty(needed, dtype=torch.uint8, device=engine.device)
    group_sizes = engine.array(list(sizes), "int64")
    plan = octavo_torch_native.index_groups(group_sizes, shape.rows, group_sizes)
    results, calls = [], []
    for operands in prepared.operands:
        out = engine.full(prepared.out_shape(case.gemm), case.out_dtype, torch.nan)
        arguments = {
            **problem,
            **_addresses("left", operands, case.gemm, 0),
            **_addresses("right", operands, case.gemm, 1),
            "plan": plan.words.data_ptr(),
            "out": out.data_ptr(),
            "tile": choice.tile,
            "workspace": workspace.data_ptr() if needed else 0,
            "workspace_bytes": needed,
        }
        results.append(out)
        calls.append(_call(cuda, gemm, arguments, (workspace, plan, operands, out)))
    return results, calls


def _call(cuda: bool, gemm: octavo_native.Gemm, arguments: dict[str, Any], alive: tuple[Any, ...]) -> Call:
    """`alive` holds what the addresses point to."""

    def call(_alive: tuple[Any, ...] = alive) -> None:
        gemm.run(**arguments, stream=torch.cuda.current_stream().cuda_stream if cuda else 0)

    return call


def _addresses(side: str, operands: dict[Any, Any], gemm: Gemm, at: int) -> dict[str, int]:
    operand, direction = SIDES[gemm][at]
    value = operands[operand]
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
