"""`octavo bench moe`: the command line. Importing this module imports neither numpy nor a framework."""

from __future__ import annotations

from typing import Annotated

import typer

from octavo_bench.errors import InputError
from octavo_bench.harness.options import (
    LAYER_REPEATS,
    Backend,
    Device,
    Kinds,
    Output,
    Quiet,
    Repeats,
    Seed,
    TokenChoices,
    backend_of,
    device_of,
    names_of,
    seed_of,
)
from octavo_bench.harness.recipes import KINDS
from octavo_bench.harness.shapes import EXPERTS, SMALL_BLOCK, Shape, parse_shapes
from octavo_bench.quantize.case import check_counts


def moe(
    device: Device = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(metavar="G,K,F,M", help="Your own experts; repeat for more.", show_default="published models'"),
    ] = None,
    choices: TokenChoices = None,
    kinds: Kinds = "",
    peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Also on torch's own grouped GEMM in bf16.")] = True,
    backend: Backend = None,
    repeats: Repeats = None,
    seed: Seed = None,
    output: Output = None,
    quick: Annotated[bool, typer.Option("--quick", help="DeepSeek-V3's alone, few repeats: seconds.")] = False,
    as_json: Quiet = False,
) -> None:
    """A MoE layer in torch, forward and backward: router, `permute`, `grouped_mlp` with SwiGLU, `unpermute`.

    Beside it the same on torch's bf16 `_grouped_mm`, in two ways of putting a token's rows together; the faster one
    counts. Every expert gets the same number of tokens. bf16 parameters and gradients, weights quantized every step.
    Exit code 1 where a row fails or nothing ran; a goal that is missed is reported and no failure.
    """
    chosen_kinds = names_of("--kinds", kinds, KINDS)
    own = parse_shapes(shape or [])
    if repeats is not None:
        check_counts(repeats=repeats)
    chosen_seed = seed_of(seed)
    where = device_of("moe", "torch", device)
    shapes = own or (SMALL_BLOCK if where == "cpu" else EXPERTS[1:2] if quick else EXPERTS)
    if choices is None:
        choices = 2 if where == "cpu" else 8
    _check_choices(choices, shapes)
    from octavo_bench.harness.attempts import check_layers
    from octavo_bench.harness.table import check_output, perform
    from octavo_bench.moe.report import print_results
    from octavo_bench.moe.work import Choices, bench_moe

    check_output(output)
    asked = Choices(
        device=where,
        shapes=shapes,
        choices=choices,
        kinds=chosen_kinds,
        peers=peers,
        backend=backend_of(backend, "torch", where),
        repeats=repeats or LAYER_REPEATS[where, quick],
        seed=chosen_seed,
    )
    results = perform(bench_moe, asked, output, as_json, print_results)
    check_layers(results, "rows")


def _check_choices(choices: int, shapes: tuple[Shape, ...]) -> None:
    for shape in shapes:
        if not 1 <= choices <= shape.groups or shape.rows % choices or shape.rows % shape.groups:
            raise InputError(
                f"--choices is {choices} and the experts are {shape.key}; give 1 to {shape.groups}, and M a multiple "
                "of it and of G"
            )
