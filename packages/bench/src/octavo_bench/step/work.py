"""The work of `octavo bench step`: forward and backward of a grouped linear layer in every recipe."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from octavo.quantizer import Operand
from octavo_bench.harness.engine.make import make_engine
from octavo_bench.harness.engine.protocol import Engine
from octavo_bench.harness.pacing import time_ratio
from octavo_bench.harness.problem import Data, backends_of, draw, layer_plan
from octavo_bench.harness.recipes import FRAMEWORK, recipe_of
from octavo_bench.harness.results import rounded
from octavo_bench.harness.run import Run, problems
from octavo_bench.harness.shapes import Shape, even
from octavo_bench.harness.timing import Call
from octavo_bench.harness.traffic import quantize_traffic
from octavo_bench.step.benchmark import StepOptions, StepRow
from octavo_registry import Weight


@dataclass(frozen=True, slots=True)
class StepCase:
    """A kind of recipe, or the framework's own bf16 (`FRAMEWORK`)."""

    kind: str
    reuse: bool = False


@dataclass(frozen=True, slots=True)
class Layer:
    """What the rows of one framework at one shape share."""

    engine: Engine
    data: Data
    sizes: tuple[int, ...]

    def calls(self, case: StepCase, options: StepOptions) -> list[Call]:
        """One per set of buffers."""
        backend = options.backend_in(self.engine.framework)
        if self.engine.framework == "jax":
            from octavo_bench.training.jax import dense_calls

            return dense_calls(self.engine, self.data, self.sizes, case.kind, backend)
        from octavo_bench.training.torch import linear_calls

        return linear_calls(self.engine, self.data, self.sizes, case.kind, backend, reuse=case.reuse)


def step_rows(run: Run[StepOptions]) -> Iterator[StepRow]:
    """Each framework's steps at each shape and vector of sizes; JAX's are timed in turns with torch's."""
    options = run.options
    engines = [make_engine(name, options.chosen_device) for name in options.chosen_frameworks]
    rate = engines[0].copy_rate()
    run.parts |= {"frameworks": list(options.chosen_frameworks), "copy_tb_per_s": rounded(rate)}
    for shape, name, sizes in problems(run):
        earlier: dict[str, Layer] = {}
        for engine in engines:
            layer = Layer(engine, draw(engine, shape, options.chosen_seed), sizes)
            served: dict[str, Layer] = {}
            for case in _cases(engine.framework, options):
                peer = f"{engine.framework}'s own" if case.kind == FRAMEWORK else None
                make = partial(_row, layer, name, case, options, earlier.get(case.kind), rate)
                for row in run.attempt(make, shape, name, case.kind, engine.framework, peer):
                    if peer is None:
                        served[case.kind] = layer
                    yield row
            earlier = served
            engine.release()
        for engine in engines:
            engine.release()


def _cases(framework: str, options: StepOptions) -> Iterator[StepCase]:
    if options.peers:
        yield StepCase(FRAMEWORK)
    for kind in options.chosen_kinds:
        yield StepCase(kind)
        if options.reuse_weights and kind != "bf16" and framework == "torch":
            yield StepCase(kind, reuse=True)


def _row(
    layer: Layer, name: str, case: StepCase, options: StepOptions, in_torch: Layer | None, rate: float | None
) -> StepRow:
    """A row; where the same step ran `in_torch`, its time over that one's as well."""
    engine, shape = layer.engine, layer.data.shape
    backends: tuple[str, ...] = ()
    if case.kind != FRAMEWORK:
        # asked first: a layer that nothing serves is a note, whatever the front end says
        weight: Weight = "kn" if engine.framework == "jax" else "nk"
        backend = options.backend_in(engine.framework)
        backends = backends_of(layer_plan(engine, shape, recipe_of(case.kind), backend, weight=weight))
    calls = layer.calls(case, options)
    times = engine.times(calls, options.chosen_repeats)
    over_torch = None
    if in_torch is not None:
        over_torch = time_ratio((in_torch.engine, in_torch.calls(case, options)), (engine, calls))
    quantize = None
    if case.kind != FRAMEWORK and not case.reuse and rate is not None:
        quantize = quantize_ms(shape, case.kind, rate)
    return StepRow(engine.framework, shape, name, case.kind, case.reuse, backends, times, over_torch, quantize)


def quantize_ms(shape: Shape, kind: str, copy_tb_per_s: float) -> float:
    """What the bytes of quantizing x, w and dy take at the copy rate; 0 for what is not quantized."""
    recipe, moved = recipe_of(kind), 0
    sides: dict[Operand, tuple[tuple[int, ...], int]] = {
        "x": (even(shape.rows, shape.groups).sizes, shape.k),
        "w": ((shape.n,) * shape.groups, shape.k),
        "dy": (even(shape.rows, shape.groups).sizes, shape.n),
    }
    for operand, (sizes, cols) in sides.items():
        spec = recipe.quantizer(operand)
        if spec is not None:
            moved += quantize_traffic(spec, sizes, cols).total
    return moved / copy_tb_per_s / 1e9
