"""`octavo bench ep`: the command line. Importing this module imports neither numpy nor a framework."""

from __future__ import annotations

from typing import Annotated

import typer

from octavo_bench.errors import InputError
from octavo_bench.harness.options import (
    LAYER_REPEATS,
    Backend,
    Device,
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
from octavo_bench.harness.shapes import EXPERTS, Shape, parse_shapes
from octavo_bench.quantize.case import check_counts

_WAYS = ("gather", "ragged")
_SMALL = (Shape("small", 4, 512, 128, 256),)
"""The default on a CPU: 128 features a shard on four devices, a block of BlockScaling's."""


def ep(
    device: Device = None,
    devices: Annotated[
        int | None, typer.Option(help="Devices that share the experts.", show_default="all that JAX sees")
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(metavar="G,K,F,M", help="Your own experts; repeat for more.", show_default="DeepSeek-V3's rank"),
    ] = None,
    choices: TokenChoices = None,
    kinds: Annotated[str, typer.Option(help=f"{', '.join(KINDS)}, with commas.")] = "bf16,block",
    ways: Annotated[
        str, typer.Option(help="gather, ragged, or both with a comma.", show_default="both (cpu gather)")
    ] = "",
    slack: Annotated[float, typer.Option(help="Rows of a device's experts, of an even share.")] = 1.25,
    backend: Backend = None,
    repeats: Repeats = None,
    seed: Seed = None,
    output: Output = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few repeats.")] = False,
    as_json: Quiet = False,
) -> None:
    """A MoE block in JAX, forward and backward, on one device and with its experts spread over several.

    Strong scaling: the same experts and tokens on all of them, tokens sent as they are and, where the recipe scales row
    by row, as its codes. Also what a device receives for it, and what it gathers of a kernel that FSDP shards, both
    counted in the compiled programs and, on GPUs, by their NVLink counters: nothing else may run on them. bf16
    parameters and gradients, weights quantized every step. Exit code 1 where a row fails, drops choices, or nothing
    ran; a goal that is missed is reported and no failure.
    """
    chosen_kinds = names_of("--kinds", kinds, KINDS)
    own = parse_shapes(shape or [])
    if repeats is not None:
        check_counts(repeats=repeats)
    if slack < 1:
        raise InputError(f"--slack is {slack}; a device needs at least an even share of the rows, 1")
    chosen_seed = seed_of(seed)
    where = device_of("ep", "jax", device)
    from octavo_bench.ep.report import print_results
    from octavo_bench.ep.work import Choices, bench_ep, check_ep
    from octavo_bench.harness.table import check_output, perform

    check_output(output)
    chosen = Choices(
        device=where,
        devices=devices or 0,
        shapes=own or (_SMALL if where == "cpu" else EXPERTS[1:2]),
        k=choices or (2 if where == "cpu" else 8),
        kinds=chosen_kinds,
        ways=names_of("--ways", ways, _WAYS) if ways or where == "cuda" else _WAYS[:1],
        slack=slack,
        backend=backend_of(backend, "jax", where),
        repeats=repeats or LAYER_REPEATS[where, quick],
        seed=chosen_seed,
    )
    results = perform(bench_ep, chosen, output, as_json, print_results)
    check_ep(results)
