"""`octavo bench step`: the command line. Importing this module imports neither numpy nor a framework."""

from __future__ import annotations

from typing import Annotated

import typer

from octavo_bench.errors import InputError
from octavo_bench.harness.options import (
    LAYER_REPEATS,
    Device,
    Kinds,
    Output,
    Quiet,
    Repeats,
    Seed,
    Shapes,
    Sizes,
    backend_of,
    device_of_all,
    frameworks_of,
    names_of,
    seed_of,
)
from octavo_bench.harness.recipes import KINDS
from octavo_bench.harness.shapes import MODELS, SIZES, SMALL, parse_shapes
from octavo_bench.quantize.case import check_counts


def step(
    framework: Annotated[str, typer.Option(help="torch, jax, or both with a comma.")] = "torch",
    device: Device = None,
    shape: Shapes = None,
    sizes: Sizes = "even,skewed",
    kinds: Kinds = "",
    reuse_weights: Annotated[
        bool, typer.Option("--reuse-weights", help="Also with weights quantized once, outside the step (torch).")
    ] = False,
    peers: Annotated[
        bool, typer.Option("--peers/--no-peers", help="Also the framework's own grouped GEMM in bf16.")
    ] = True,
    backend: Annotated[
        str | None,
        typer.Option(
            help="Names of backends, best first, with commas; of one framework.",
            show_default="native on cuda, else the registry's",
        ),
    ] = None,
    repeats: Repeats = None,
    seed: Seed = None,
    output: Output = None,
    quick: Annotated[bool, typer.Option("--quick", help="Two shapes, even groups, few repeats: seconds.")] = False,
    as_json: Quiet = False,
) -> None:
    """A whole grouped linear layer, forward and backward, in each recipe, beside the framework's own bf16.

    With both frameworks each step in JAX is held to the same one in torch, in one run. bf16 parameters, gradients in
    bf16, weights quantized every step. Figures of TransformerEngine are quoted, labelled as recorded. Exit code 1 where
    a step fails or nothing ran; a goal that is missed is reported and no failure.
    """
    frameworks = frameworks_of(framework)
    chosen_kinds = names_of("--kinds", kinds, KINDS)
    wanted_sizes = names_of("--sizes", sizes, SIZES)
    own = parse_shapes(shape or [])
    if repeats is not None:
        check_counts(repeats=repeats)
    if backend is not None and len(frameworks) > 1:
        raise InputError(
            "--backend names backends of one framework and --framework two; leave it out, or run each alone"
        )
    if reuse_weights and "torch" not in frameworks:
        raise InputError("--reuse-weights is torch's; octavo_jax.grouped_dense quantizes its kernel in each call")
    chosen_seed = seed_of(seed)
    where = device_of_all("step", frameworks, device)
    from octavo_bench.harness.attempts import check_layers
    from octavo_bench.harness.table import check_output, perform
    from octavo_bench.step.report import print_results
    from octavo_bench.step.work import Choices, bench_step

    check_output(output)
    shapes = SMALL if where == "cpu" else MODELS[1:3] if quick else MODELS
    choices = Choices(
        frameworks=frameworks,
        device=where,
        shapes=own or shapes,
        sizes=wanted_sizes[:1] if quick and not own else wanted_sizes,
        kinds=chosen_kinds,
        reuse=reuse_weights,
        peers=peers,
        backend={name: backend_of(backend, name, where) for name in frameworks},
        repeats=repeats or LAYER_REPEATS[where, quick],
        seed=chosen_seed,
    )
    results = perform(bench_step, choices, output, as_json, print_results)
    check_layers(results, "steps")
