"""The work of `octavo bench host`: what Python, the public API and a graph's gaps cost beside the kernels."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

from octavo_bench.harness.engine.torch import TorchEngine
from octavo_bench.harness.options import Names
from octavo_bench.harness.problem import Data, backends_of, draw, layer_plan
from octavo_bench.harness.recipes import FRAMEWORK, recipe_of
from octavo_bench.harness.run import Run, problems
from octavo_bench.harness.shapes import Shape
from octavo_bench.host.benchmark import ApiRow, BlockRow, HostOptions, HostRow
from octavo_bench.host.block import block_call, host_of_block, replay_of_block
from octavo_bench.host.torch import host_of_layer, host_of_torch, raw_calls, times_and_graph
from octavo_bench.training.moe import Layer as Block
from octavo_bench.training.moe import draw_layer, layer_backends
from octavo_bench.training.torch import linear_calls

_HOST_REPEATS = {"cuda": 60, "cpu": 3}


def host_rows(run: Run[HostOptions]) -> Iterator[HostRow | BlockRow | ApiRow]:
    """Python's time at each number of experts, and of MoE layers; then layers beside their kernels."""
    options = run.options
    engine = TorchEngine(options.chosen_device)
    for kind, shape in product((FRAMEWORK, *options.chosen_kinds), options.host_shapes):
        run.say(f"{kind}, {shape.groups} experts ...")
        peer = "torch's own" if kind == FRAMEWORK else None
        make = partial(_host_row, engine, shape, kind, options)
        yield from run.attempt(make, shape, "even", kind, "host time", peer)
    for shape, choices in options.block_shapes:
        block = draw_layer(engine, shape, choices, options.chosen_seed)
        for kind in (FRAMEWORK, *options.chosen_kinds):
            run.say(f"{kind}, a MoE layer of {shape.rows // choices} tokens ...")
            peer = "torch's own" if kind == FRAMEWORK else None
            yield from run.attempt(
                partial(_block_row, engine, block, kind, options), shape, "even", kind, "host time", peer
            )
        del block
        engine.release()
    for shape, name, sizes in problems(run):
        data = draw(engine, shape, options.chosen_seed)
        for kind in options.chosen_kinds:
            layer = partial(_api_row, engine, data, name, sizes, kind, options)
            yield from run.attempt(layer, shape, name, kind, "layer")
        del data
        engine.release()


def _backends(engine: TorchEngine, shape: Shape, kind: str, backend: Names) -> tuple[str, ...]:
    return backends_of(layer_plan(engine, shape, recipe_of(kind), backend))


def _host_row(engine: TorchEngine, shape: Shape, kind: str, options: HostOptions) -> HostRow:
    repeats, backend = _HOST_REPEATS[options.chosen_device], options.chosen_backend
    if kind == FRAMEWORK:
        return HostRow(kind, shape, (), host_of_torch(engine, shape, repeats))
    backends = _backends(engine, shape, kind, backend)
    return HostRow(kind, shape, backends, host_of_layer(engine, kind, shape, backend, repeats))


def _block_row(engine: TorchEngine, block: Block, kind: str, options: HostOptions) -> BlockRow:
    backend = options.chosen_backend
    backends = () if kind == FRAMEWORK else layer_backends(block, kind, backend)
    host, one_thread = host_of_block(engine, block_call(block, kind, backend), _HOST_REPEATS[options.chosen_device])
    captured = block_call(block, kind, options.backend_in_graphs)
    replay = replay_of_block(engine, captured, options.chosen_repeats)
    return BlockRow(kind, block.shape, block.choices, backends, host, one_thread, replay)


def _api_row(
    engine: TorchEngine, data: Data, name: str, sizes: tuple[int, ...], kind: str, options: HostOptions
) -> ApiRow:
    backend, repeats = options.chosen_backend, options.chosen_repeats
    backends = _backends(engine, data.shape, kind, backend)
    ways = [
        raw_calls(engine, data, sizes, kind, backend),
        linear_calls(engine, data, sizes, kind, backend),
    ]
    if not engine.cuda:
        raw, api = (engine.times(calls, repeats) for calls in ways)
        return ApiRow(data.shape, name, kind, backends, api, raw, None)
    captured = linear_calls(engine, data, sizes, kind, options.backend_in_graphs)
    raw, api, graph = times_and_graph(ways, captured[0], repeats)
    return ApiRow(data.shape, name, kind, backends, api, raw, graph)
