"""`octavo bench gemm`: the command line. Importing this module imports neither numpy nor a framework."""

from __future__ import annotations

from typing import Annotated

import typer

from octavo_bench.errors import RunError
from octavo_bench.harness.options import (
    Backend,
    Device,
    Framework,
    Kinds,
    Ops,
    Output,
    Quiet,
    Repeats,
    Seed,
    Shapes,
    Sizes,
    backend_of,
    check_framework,
    device_of,
    gemms_of,
    names_of,
    seed_of,
)
from octavo_bench.harness.recipes import KINDS, chosen_cases
from octavo_bench.harness.shapes import DEEPGEMM, MODELS, SIZES, SMALL, Shape, parse_shapes
from octavo_bench.quantize.case import check_counts

_DEEPGEMM_KINDS = ("bf16", "block")
_REPEATS = {("cuda", False): 20, ("cuda", True): 8, ("cpu", False): 3, ("cpu", True): 1}


def gemm(
    framework: Framework = "torch",
    device: Device = None,
    shape: Shapes = None,
    sizes: Sizes = "even,skewed",
    ops: Ops = "",
    kinds: Kinds = "",
    fast: Annotated[
        bool, typer.Option("--fast/--no-fast", help="Also FP8 without promotion, against peers without it.")
    ] = True,
    backend: Backend = None,
    repeats: Repeats = None,
    seed: Seed = None,
    output: Output = None,
    quick: Annotated[bool, typer.Option("--quick", help="Two shapes, even groups, few repeats: seconds.")] = False,
    as_json: Quiet = False,
) -> None:
    """Grouped GEMMs of every kind beside the framework's own, cuBLAS's dense ones and the goals.

    Operands are quantized beforehand; the quantizers' time is in the advice. Sampled outputs of each GEMM are compared
    with float64. Exit code 1 where one is outside its error bound, a GEMM fails or nothing ran; a goal that is missed
    is reported and no failure.
    """
    check_framework(framework)
    gemms = gemms_of(ops)
    chosen_kinds = names_of("--kinds", kinds, KINDS)
    wanted_sizes = names_of("--sizes", sizes, SIZES)
    own = parse_shapes(shape or [])
    if repeats is not None:
        check_counts(repeats=repeats)
    chosen_seed = seed_of(seed)
    where = device_of("gemm", framework, device)
    from octavo_bench.gemm.report import print_results
    from octavo_bench.gemm.work import Choices, Work, bench_gemm
    from octavo_bench.harness.table import check_output, perform

    check_output(output)
    # JAX gets no buffers to add to, so an accumulator would be copied first
    cases = chosen_cases(chosen_kinds, gemms, fast=fast and not quick, accumulate=framework == "torch" and not quick)
    some = cases if kinds else [case for case in cases if case.kind in _DEEPGEMM_KINDS]
    shapes = own or _default_shapes(where, quick)
    work = [Work(one, wanted_sizes[:1] if quick and not own else wanted_sizes, tuple(cases)) for one in shapes]
    if where == "cuda" and not quick and not own:
        models = {one.key for one in MODELS}
        work += [Work(one, ("even",), tuple(some)) for one in DEEPGEMM if one.key not in models]
    choices = Choices(
        framework=framework,
        device=where,
        work=tuple(one for one in work if one.cases),
        backend=backend_of(backend, framework, where),
        repeats=repeats or _REPEATS[where, quick],
        seed=chosen_seed,
        peers=True,
    )
    results = perform(bench_gemm, choices, output, as_json, print_results)
    if results.differing or results.failures:
        raise RunError(
            f"{len(results.differing)} GEMMs are outside their error bound and {len(results.failures)} failed; "
            "the match column and the lines with FAILED say which"
        )
    if not results.rows:
        raise RunError("no backend serves any of these GEMMs; the notes say why, and so does `octavo why`")


def _default_shapes(device: str, quick: bool) -> tuple[Shape, ...]:
    if device == "cpu":
        return SMALL
    return MODELS[1:3] if quick else MODELS
