"""`octavo advise`: the command line. Importing this module imports neither numpy nor a framework."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

_OF_RANKS = ("per_host", "choices", "skew", "layers", "network")
_OF_ONE_GPU = ("weights", "min_sqnr", "results", "rows", "trust")
"""Options that mean something with --ranks alone, and without it alone."""

_RECIPES = "bf16,fp8-current,fp8-row,fp8-block,mxfp8,mxfp8-folded,nvfp4"


def advise(
    context: typer.Context,
    shape: Annotated[
        str | None,
        typer.Option(
            help="G,K,N,M of a grouped layer: weights [G, N, K], rows [M, K]. With --ranks G,K,F,M of a MoE layer: G "
            "experts of all ranks, F hidden features, M choices of one rank's tokens.",
            show_default="DeepSeek-V3's 256,7168,2048,65536 with --ranks, else required",
        ),
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(help="A checkpoint to judge by.", show_default="normally distributed values")
    ] = None,
    recipes: Annotated[str, typer.Option(help="Recipe names or files, with commas.")] = _RECIPES,
    ranks: Annotated[
        int | None,
        typer.Option(help="GPUs to spread experts over: route, wire and experts of each.", show_default=False),
    ] = None,
    per_host: Annotated[int, typer.Option(help="With --ranks: GPUs of a host, which share its links.")] = 8,
    choices: Annotated[int, typer.Option(help="With --ranks: experts of each token.")] = 8,
    skew: Annotated[float, typer.Option(help="With --ranks: rows of the busiest rank, divided by the average.")] = 1.25,
    layers: Annotated[int, typer.Option(help="With --ranks: MoE layers whose experts share a GPU's memory.")] = 1,
    micro_batches: Annotated[
        int, typer.Option(help="Micro-batches of one optimizer step, which share the weights' codes.")
    ] = 8,
    network: Annotated[float, typer.Option(help="With --ranks: GB/s from one rank to other hosts.")] = 44.0,
    min_sqnr: Annotated[float, typer.Option(help="Decibels that the weights of a recipe must keep.")] = 25.0,
    chip: Annotated[str, typer.Option(help="Chip to predict times for: h100 or h200.")] = "h200",
    results: Annotated[
        list[Path] | None, typer.Option(help="Results of octavo bench gemm with measured times.", show_default=False)
    ] = None,
    rows: Annotated[int, typer.Option(help="Rows of each expert to judge by; 0: all.")] = 256,
    trust: Annotated[bool, typer.Option("--trust", help="Read DCP's .metadata, a pickle, which may run code.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, errors too.")] = False,
) -> None:
    """Which recipe suits a layer: SQNR of its weights, bytes, and the time of its three GEMMs.

    The GEMMs' time is the median of a result file where --results has this shape on this chip, and is called measured;
    else it is the chip's roofline, which no kernel beats. Quantizers are bounded by the bytes that they move: with few
    rows per expert they take what products of codes save, and bf16 is the advice.

    With --ranks: how to spread a MoE layer's experts over GPUs, by a model of its step in one recipe (fp8-block unless
    --recipes names another): the ranks of a group and experts of each, the route, what travels, and the part of the
    step that is exposed.
    """
    _check_given(context, ranks)
    if ranks is not None:
        from octavo_cli.advice import Shape
        from octavo_cli.errors import InputError
        from octavo_cli.ranks.command import advise_ranks, cluster_of, layer_of

        if chip != "h200":
            raise InputError(f"--chip is {chip!r}; with --ranks give h200, which was measured")
        sides = Shape.of(shape or "256,7168,2048,65536")
        spread = layer_of((sides.groups, sides.k, sides.n, sides.m), choices)
        cluster = cluster_of(ranks, per_host, layers, micro_batches, network)
        advise_ranks(spread, cluster, "fp8-block" if recipes == _RECIPES else recipes.strip(), skew, as_json)
        return
    from octavo.errors import one_of
    from octavo_cli.advice import CHIPS, Shape, advice_on, measured_us, weights_for
    from octavo_cli.advice_report import AdviceReport
    from octavo_cli.errors import InputError
    from octavo_registry.cli.output import print_json
    from octavo_registry.cli.recipes import find_recipe

    one_of("--chip", chip, tuple(CHIPS), InputError)
    if rows < 0:
        raise InputError(f"--rows is {rows}; give 0 for all rows, or how many of each expert")
    if micro_batches < 1:
        raise InputError(f"--micro-batches is {micro_batches}; give 1 or more")
    if not math.isfinite(min_sqnr):
        raise InputError(f"--min-sqnr is {min_sqnr}; give decibels, such as 25")
    if shape is None:
        raise InputError("--shape is missing; give G,K,N,M of a grouped layer, such as 32,7168,4096,32768, or --ranks")
    layer = Shape.of(shape)
    names = list(dict.fromkeys(part.strip() for part in recipes.split(",") if part.strip()))
    if not names:
        raise InputError("--recipes is empty; give names with commas between them, such as mxfp8,nvfp4")
    chosen = {name: find_recipe(name) for name in names}
    judged, what = weights_for(layer, weights, trust=trust, rows=rows, seed=0)
    measured, notes = measured_us(results or [], layer, CHIPS[chip])
    found = [
        advice_on(name, recipe, layer, judged, CHIPS[chip], measured, micro_batches) for name, recipe in chosen.items()
    ]
    report = AdviceReport(
        shape=layer,
        given_shape=shape,
        chip=CHIPS[chip],
        judged_by=what,
        notes=notes,
        least_sqnr=min_sqnr,
        micro_batches=micro_batches,
        recipes=chosen,
        advice=found,
    )
    if as_json:
        print_json(report.as_dict())
    else:
        report.show()


def _check_given(context: typer.Context, ranks: int | None) -> None:
    """InputError for an option that the question does not read: its answer would be of something else."""
    from octavo_cli.errors import InputError

    unread, why = (_OF_RANKS, "needs --ranks") if ranks is None else (_OF_ONE_GPU, "is not read with --ranks")
    for name in unread:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise InputError(f"--{name.replace('_', '-')} {why}; leave it out")
