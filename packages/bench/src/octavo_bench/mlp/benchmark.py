"""`octavo bench mlp`: the command line. Importing this module imports neither numpy nor a framework."""

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


def mlp(
    device: Device = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(metavar="G,K,F,M", help="Your own experts; repeat for more.", show_default="published models'"),
    ] = None,
    sizes: Sizes = "even",
    kinds: Kinds = "",
    probs: Annotated[
        bool, typer.Option("--probs/--no-probs", help="Rows weighted, with the weights' gradient.")
    ] = True,
    peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Also on torch's own grouped GEMM in bf16.")] = True,
    backend: Backend = None,
    repeats: Repeats = None,
    seed: Seed = None,
    output: Output = None,
    quick: Annotated[bool, typer.Option("--quick", help="Two shapes, few repeats: seconds.")] = False,
    as_json: Quiet = False,
) -> None:
    """Expert MLPs with SwiGLU in torch, forward and backward: `grouped_mlp` beside the same operations in a row.

    Those are `grouped_linear`, `silu(gate) * up * probs` as torch runs it, and `grouped_linear`. bf16 parameters and
    gradients, weights quantized every step. Exit code 1 where a row fails or nothing ran; a goal that is missed is
    reported and no failure.
    """
    chosen_kinds = names_of("--kinds", kinds, KINDS)
    wanted_sizes = names_of("--sizes", sizes, SIZES)
    own = parse_shapes(shape or [])
    if repeats is not None:
        check_counts(repeats=repeats)
    chosen_seed = seed_of(seed)
    where = device_of("mlp", "torch", device)
    from octavo_bench.harness.attempts import check_layers
    from octavo_bench.harness.table import check_output, perform
    from octavo_bench.mlp.report import print_results
    from octavo_bench.mlp.work import Choices, bench_mlp

    check_output(output)
    choices = Choices(
        device=where,
        shapes=own or (SMALL_BLOCK if where == "cpu" else EXPERTS[1:3] if quick else EXPERTS),
        sizes=wanted_sizes,
        kinds=chosen_kinds,
        probs=probs,
        peers=peers,
        backend=backend_of(backend, "torch", where),
        repeats=repeats or LAYER_REPEATS[where, quick],
        seed=chosen_seed,
    )
    results = perform(bench_mlp, choices, output, as_json, print_results)
    check_layers(results, "rows")
