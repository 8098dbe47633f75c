"""`octavo train`: the command line. Importing this module imports neither numpy nor a framework."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def train(
    recipes: Annotated[
        str, typer.Option(help="Preset names or recipe files (.toml, .json), with commas; bf16 always runs.")
    ] = "bf16,fp8-block,mxfp8,nvfp4",
    text: Annotated[
        Path | None, typer.Option(help="Text to learn instead of Python's own pydoc_data.topics.", show_default=False)
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for curves.json, loss.png, expert_load.png, index.html.")] = Path(
        "demo-output"
    ),
    framework: Annotated[
        str | None, typer.Option(help="torch or jax.", show_default="what is installed, torch first")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.", show_default="120")] = None,
    seed: Annotated[int, typer.Option(help="First seed: data order, initial parameters, stochastic rounding.")] = 0,
    seeds: Annotated[int, typer.Option(help="Number of seeds; from two on the spread is that over seeds.")] = 1,
    experts: Annotated[int | None, typer.Option(help="Experts in a layer.", show_default="8")] = None,
    top_k: Annotated[int, typer.Option(help="Experts that a token goes to.")] = 2,
    width: Annotated[
        int | None, typer.Option(help="Model channels, a multiple of 32; experts have twice.", show_default="128")
    ] = None,
    layers: Annotated[int, typer.Option(help="Layers of attention and experts.")] = 1,
    quick: Annotated[
        bool, typer.Option("--quick", help="A few steps of a smaller model: does everything work?")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what curves.json holds; progress goes nowhere.")
    ] = False,
) -> None:
    """Train a small Mixture-of-Experts language model on real text, in each recipe, and compare it with bf16."""
    from octavo_cli.train.demo import Choices, run_demo

    sizes = {"steps": steps, "experts": experts, "width": width, "hidden": None if width is None else 2 * width}
    run_demo(
        Choices(
            recipes=recipes,
            text=text,
            out=out,
            framework=framework,
            device=device,
            quick=quick,
            as_json=as_json,
            fixed={"seed": seed, "seeds": seeds, "top_k": top_k, "layers": layers},
            sizes={name: value for name, value in sizes.items() if value is not None},
        )
    )
