"""`octavo bench host`: the command line. Importing this module imports neither numpy nor a framework."""

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
    Shapes,
    Sizes,
    backend_of,
    device_of,
    names_of,
    seed_of,
)
from octavo_bench.harness.recipes import KINDS
from octavo_bench.harness.shapes import MODELS, SIZES, SMALL, parse_shapes
from octavo_bench.quantize.case import check_counts

_EXPERTS = {("cuda", False): (8, 32, 128, 512), ("cuda", True): (8, 512), ("cpu", False): (4, 32), ("cpu", True): (4,)}
_ROWS = {"cuda": 4096, "cpu": 256}


def host(
    device: Device = None,
    shape: Shapes = None,
    sizes: Sizes = "even",
    kinds: Kinds = "",
    backend: Backend = None,
    repeats: Repeats = None,
    seed: Seed = None,
    output: Output = None,
    quick: Annotated[bool, typer.Option("--quick", help="Two shapes, fewer experts, few repeats: seconds.")] = False,
    as_json: Quiet = False,
) -> None:
    """What calling a layer costs beside its kernels, in torch: Python's time, the public API, a graph's gaps.

    Python's time of forward and backward is taken at several numbers of experts. A whole step through `grouped_linear`
    is held to its quantizers and GEMMs called one after the other, and a replay of its CUDA graph to the sum of its
    kernels as torch's profiler sees them. Exit code 1 where a row fails or nothing ran; a goal that is missed is
    reported and no failure.
    """
    chosen_kinds = names_of("--kinds", kinds, KINDS)
    wanted_sizes = names_of("--sizes", sizes, SIZES)
    own = parse_shapes(shape or [])
    if repeats is not None:
        check_counts(repeats=repeats)
    chosen_seed = seed_of(seed)
    where = device_of("host", "torch", device)
    from octavo_bench.harness.attempts import check_layers
    from octavo_bench.harness.table import check_output, perform
    from octavo_bench.host.report import print_results
    from octavo_bench.host.work import Choices, bench_host

    check_output(output)
    asked = Choices(
        device=where,
        shapes=own or (SMALL if where == "cpu" else MODELS[1:3] if quick else MODELS),
        sizes=wanted_sizes,
        kinds=chosen_kinds,
        groups=_EXPERTS[where, quick],
        rows=_ROWS[where],
        backend=backend_of(backend, "torch", where),
        # without a wish the registry chooses, who has plans for graphs and others
        in_graphs=None if backend is None else backend_of(backend, "torch", where),
        repeats=repeats or LAYER_REPEATS[where, quick],
        seed=chosen_seed,
    )
    results = perform(bench_host, asked, output, as_json, print_results)
    check_layers(results, "rows")
