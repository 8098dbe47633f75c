"""`octavo bench remat`: the command line. Importing this module imports neither numpy nor a framework."""

from __future__ import annotations

from typing import Annotated

import typer

from octavo_bench.harness.options import (
    LAYER_REPEATS,
    Backend,
    Device,
    Kinds,
    Output,
    Quiet,
    Repeats,
    Seed,
    Sizes,
    backend_of,
    device_of,
    names_of,
    seed_of,
)
from octavo_bench.harness.recipes import KINDS
from octavo_bench.harness.shapes import EXPERTS, SIZES, SMALL_BLOCK, parse_shapes
from octavo_bench.quantize.case import check_counts


def remat(
    device: Device = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(metavar="G,K,F,M", help="Your own experts; repeat for more.", show_default="Qwen3-235B's"),
    ] = None,
    sizes: Sizes = "even",
    kinds: Kinds = "current,block,mxfp8",
    layers: Annotated[int, typer.Option(help="Layers of the block.")] = 5,
    unroll: Annotated[bool, typer.Option("--unroll", help="Layers one after another instead of a lax.scan.")] = False,
    peers: Annotated[
        bool, typer.Option("--peers/--no-peers", help="Also the block on jax.lax.ragged_dot in bf16.")
    ] = True,
    backend: Backend = None,
    repeats: Repeats = None,
    seed: Seed = None,
    output: Output = None,
    quick: Annotated[bool, typer.Option("--quick", help="One recipe, no peers, few repeats: seconds.")] = False,
    as_json: Quiet = False,
) -> None:
    """A block of expert layers in JAX under `jax.checkpoint`: its time, memory, runs and compilation by policy.

    Plain remat quantizes x and the kernels twice; `octavo_jax.policies.save_quantized` keeps them. Exit code 1 where
    a row fails or nothing ran; a goal that is missed is reported and no failure.
    """
    chosen_kinds = names_of("--kinds", kinds, KINDS)
    wanted_sizes = names_of("--sizes", sizes, SIZES)
    own = parse_shapes(shape or [])
    check_counts(layers=layers, **({} if repeats is None else {"repeats": repeats}))
    chosen_seed = seed_of(seed)
    where = device_of("remat", "jax", device)
    from octavo_bench.harness.attempts import check_layers
    from octavo_bench.harness.table import check_output, perform
    from octavo_bench.remat.report import print_results
    from octavo_bench.remat.work import Choices, bench_remat

    check_output(output)
    choices = Choices(
        device=where,
        shapes=own or (EXPERTS[2:3] if where == "cuda" else SMALL_BLOCK),
        sizes=wanted_sizes,
        kinds=chosen_kinds[:1] if quick else chosen_kinds,
        layers=layers,
        unroll=unroll,
        peers=peers and not quick,
        backend=backend_of(backend, "jax", where),
        repeats=repeats or LAYER_REPEATS[where, quick],
        seed=chosen_seed,
    )
    results = perform(bench_remat, choices, output, as_json, print_results)
    check_layers(results, "rows")
