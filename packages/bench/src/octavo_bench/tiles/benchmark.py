"""`octavo bench tiles`: the command line. Importing this module imports neither numpy nor a framework."""

from __future__ import annotations

from typing import Annotated

import typer

from octavo_bench.errors import RunError
from octavo_bench.harness.options import (
    Device,
    Ops,
    Output,
    Quiet,
    Repeats,
    Seed,
    Shapes,
    Sizes,
    check_installed,
    device_of,
    gemms_of,
    names_of,
    seed_of,
)
from octavo_bench.harness.recipes import KINDS
from octavo_bench.harness.shapes import DEEPGEMM, MODELS, SIZES, SMALL, parse_shapes
from octavo_bench.quantize.case import check_counts

_KINDS = "bf16,current,block"
_REPEATS = {("cuda", False): 10, ("cuda", True): 6, ("cpu", False): 2, ("cpu", True): 1}


def tiles(
    device: Device = None,
    shape: Shapes = None,
    sizes: Sizes = "even",
    ops: Ops = "",
    kinds: Annotated[str, typer.Option(help=f"{', '.join(KINDS)}, with commas.")] = _KINDS,
    repeats: Repeats = None,
    seed: Seed = None,
    output: Output = None,
    quick: Annotated[bool, typer.Option("--quick", help="Two shapes, few repeats: seconds.")] = False,
    as_json: Quiet = False,
) -> None:
    """Every tile of octavo-native's GEMMs against the one that its model chooses, in torch.

    The chosen tile is to be within 3 % of the fastest; predicted times stand beside measured ones. Exit code 1 where a
    tile fails or gives another result; a choice that is worse is reported and no failure.
    """
    gemms = gemms_of(ops)
    chosen_kinds = names_of("--kinds", kinds, KINDS)
    wanted_sizes = names_of("--sizes", sizes, SIZES)
    own = parse_shapes(shape or [])
    if repeats is not None:
        check_counts(repeats=repeats)
    chosen_seed = seed_of(seed)
    check_installed("tiles", ("torch", "octavo_torch", "octavo_native", "octavo_torch_native"), "torch-native")
    where = device_of("tiles", "torch", device)
    from octavo_bench.harness.table import check_output, perform
    from octavo_bench.tiles.report import print_results
    from octavo_bench.tiles.sweep import Choices, bench_tiles

    check_output(output)
    published = MODELS[1:3] if quick else tuple({one.key: one for one in (*MODELS, *DEEPGEMM)}.values())
    choices = Choices(
        device=where,
        shapes=own or (SMALL if where == "cpu" else published),
        sizes=wanted_sizes,
        kinds=chosen_kinds,
        gemms=gemms,
        repeats=repeats or _REPEATS[where, quick],
        seed=chosen_seed,
    )
    results = perform(bench_tiles, choices, output, as_json, print_results)
    if results.differing or results.failures:
        raise RunError(
            f"{len(results.differing)} sweeps have a tile with another result and {len(results.failures)} failed; "
            "the lines with DIFFERS and FAILED say which"
        )
