"""`octavo inspect`: the command line. Importing this module imports neither numpy nor a framework."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from octavo_cli.inspection.study import Study


def inspect(
    files: Annotated[list[Path], typer.Argument(help="Files (.safetensors, .npz) or folders (DCP, orbax).")],
    recipes: Annotated[
        str, typer.Option(help="Recipe names or files, with commas.")
    ] = "fp8-current,fp8-row,fp8-block,mxfp8,nvfp4",
    match: Annotated[str, typer.Option(help="Tensors whose names fit this pattern.")] = "*",
    rows: Annotated[
        int, typer.Option(help="Rows of each expert that recipes are tried on; 0: all. The amax is that of all rows.")
    ] = 256,
    weight: Annotated[
        str | None,
        typer.Option(
            help="How matrices are stored: nk as [N, K], torch's; kn as [K, N], JAX's.",
            show_default="kn of orbax, else nk",
        ),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write an interactive page.", show_default=False)] = None,
    trust: Annotated[bool, typer.Option("--trust", help="Read DCP's .metadata, a pickle, which may run code.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, errors too.")] = False,
) -> None:
    """What is in a checkpoint, and what each recipe would do to its tensors: SQNR, underflow, saturation, by expert.

    Matrices [N, K] and experts [G, N, K] are quantized as weights, K being the features that are summed over; those of
    JAX are [K, N] and [G, K, N].
    """
    from octavo_cli.errors import InputError
    from octavo_cli.inspection.files import each_tensor, open_source, why_not
    from octavo_cli.inspection.study import recipes_of, study
    from octavo_cli.inspection.tables import print_studies
    from octavo_registry.cli.files import check_writable, write_whole
    from octavo_registry.cli.output import print_json, print_line

    if rows < 0:
        raise InputError(f"--rows is {rows}; give 0 for all rows, or how many of each expert")
    if weight not in (None, "nk", "kn"):
        raise InputError(f"--weight is {weight!r}; it is nk, as torch stores matrices, or kn, as JAX does")
    chosen = recipes_of(recipes)
    if html is not None:
        check_writable("--html", html, "page.html")
    sources = [open_source(path, trust=trust) for path in files]
    prefixes = _prefixes(files)
    studies: list[Study] = []
    for prefix, source in zip(prefixes, sources, strict=True):
        for name, values in each_tensor(source):
            if fnmatch.fnmatchcase(name, match):
                skipped = why_not(source, name, values)
                studies.append(study(f"{prefix}{name}", values, skipped, chosen, rows, weight or source.weight))
    if not studies:
        names = ", ".join(sorted(name for source in sources for name in source.tensors)[:6])
        raise InputError(f"--match {match!r} fits none of the tensors; their names are such as {names}")
    trained_in = {
        f"{prefix}{layer}": recipe
        for prefix, source in zip(prefixes, sources, strict=True)
        for layer, recipe in source.recipes.items()
    }
    named = {
        layer: f"{kind} ({fingerprint})" if kind else fingerprint for layer, (kind, fingerprint) in trained_in.items()
    }
    if html is not None:
        from octavo_cli.inspection.page import render_page

        write_whole(html, render_page(", ".join(path.name for path in files), studies, chosen, named))
    if as_json:
        print_json({
            "schema_version": 1,
            "files": [{"path": str(source.path), "kind": source.kind} for source in sources],
            "recipes": {name: recipe.fingerprint for name, recipe in chosen.items()},
            "trained_in": {
                layer: {"kind": kind or None, "fingerprint": fingerprint}
                for layer, (kind, fingerprint) in trained_in.items()
            },
            "tensors": [item.as_dict() for item in studies],
        })  # fmt: skip
        return
    print_studies(studies, chosen, named)
    if html is not None:
        print_line(f"Wrote {html}.")


def _prefixes(files: Sequence[Path]) -> list[str]:
    """What tells the tensors of several files apart: names, or paths where names are alike. One file needs nothing."""
    if len(files) == 1:
        return [""]
    names = [path.name for path in files]
    return [f"{path if names.count(path.name) > 1 else path.name}: " for path in files]
