"""`octavo bench`: the command line. Importing this module imports neither numpy nor a framework."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from octavo.formats import DType
from octavo_bench.ep.benchmark import ep
from octavo_bench.errors import InputError, RunError
from octavo_bench.gemm.benchmark import gemm
from octavo_bench.harness.options import check_installed, one_of, seed_of
from octavo_bench.host.benchmark import host
from octavo_bench.mlp.benchmark import mlp
from octavo_bench.moe.benchmark import moe
from octavo_bench.quantize.case import check_counts, chosen_cases, parse_shapes
from octavo_bench.remat.benchmark import remat
from octavo_bench.step.benchmark import step
from octavo_bench.tiles.benchmark import tiles

app = typer.Typer(add_completion=False, no_args_is_help=True)

_DTYPES: dict[str, DType] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_SHAPES = {
    ("cuda", False): "32768x7168,65536x4096",
    ("cuda", True): "32768x7168",
    ("cpu", False): "2048x2048",
    ("cpu", True): "1024x1024",
}
_REPEATS = {("cuda", False): 50, ("cuda", True): 15, ("cpu", False): 5, ("cpu", True): 3}
_NEEDED = ("torch", "octavo_torch", "octavo_native", "octavo_torch_native")

app.command()(ep)
app.command()(gemm)
app.command()(host)
app.command()(mlp)
app.command()(moe)
app.command()(remat)
app.command()(step)
app.command()(tiles)


@app.callback()
def bench() -> None:
    """Time Octavo's kernels beside the hardware's limits and beside the frameworks' own."""


@app.command()
def quantize(
    device: Annotated[
        str | None, typer.Option(help="cuda or cpu.", show_default="cuda where there is a GPU, else cpu")
    ] = None,
    shapes: Annotated[
        str | None, typer.Option(help="ROWSxCOLUMNS, with commas.", show_default=_SHAPES["cuda", False])
    ] = None,
    groups: Annotated[int, typer.Option(help="Groups of (nearly) equal size.")] = 8,
    ragged_groups: Annotated[
        int, typer.Option(help="Groups of the second table: Dirichlet(0.5) sizes, one of them empty.")
    ] = 128,
    recipes: Annotated[
        str, typer.Option(help="delayed, current, row, block, mxfp8, nvfp4, with commas.", show_default="all")
    ] = "",
    dtype: Annotated[str, typer.Option(help="Of the input: bf16, fp16 or fp32.")] = "bf16",
    repeats: Annotated[
        int | None, typer.Option(help="Timed calls of each case; the median counts.", show_default="50 (cpu 5)")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of data and ragged sizes.", show_default="new, printed")] = None,
    output: Annotated[Path | None, typer.Option(help="JSON file to write.", show_default="none")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One shape, few repeats, nothing compiled: seconds.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what the file holds; progress goes nowhere.")] = False,
) -> None:
    """Grouped quantization, each recipe: time against the bytes it has to move, and against torch.compile.

    Every case is compared with the definition, bit for bit, before it is timed. Exit code 1 where bits differ or a
    case fails; a goal that is missed is reported and no failure.
    """
    chosen = chosen_cases(recipes)
    counts = {"groups": groups, "ragged_groups": ragged_groups}
    check_counts(**counts, **({} if repeats is None else {"repeats": repeats}))
    sides = None if shapes is None else parse_shapes(shapes)
    if dtype not in _DTYPES:
        raise InputError(f"--dtype is {dtype!r}; it is bf16, fp16 or fp32")
    if device is not None:
        one_of("--device", device, ("cpu", "cuda"))
    chosen_seed = seed_of(seed)
    check_installed("quantize", _NEEDED, "torch-native")
    from octavo_bench.harness.table import check_output, perform, print_results
    from octavo_bench.quantize.work import Choices, bench_quantize

    check_output(output)
    where = _device(device)
    choices = Choices(
        device=where,
        shapes=sides or parse_shapes(_SHAPES[where, quick]),
        groups=groups,
        ragged_groups=ragged_groups,
        cases=chosen,
        dtype=_DTYPES[dtype],
        repeats=repeats or _REPEATS[where, quick],
        seed=chosen_seed,
        peers=not quick,
    )
    results = perform(bench_quantize, choices, output, as_json, print_results)
    if results.differing or results.failures:
        raise RunError(
            f"{len(results.differing)} rows differ from the definition and {len(results.failures)} failed; "
            "the match column and the lines with FAILED say which"
        )


def _device(wanted: str | None) -> str:
    import torch

    import octavo_native

    usable = torch.cuda.is_available() and octavo_native.HAS_CUDA
    if wanted == "cuda" and not usable:
        reason = (
            "octavo-native was built without CUDA kernels"
            if torch.cuda.is_available()
            else "torch sees no CUDA device here"
        )
        raise InputError(f"--device is cuda and {reason}; use --device cpu")
    return wanted or ("cuda" if usable else "cpu")
