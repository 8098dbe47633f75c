"""The main job: train every recipe, compare the bits, write the report."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from octavo import Recipe
from octavo_cli.errors import InputError, RunError
from octavo_cli.train.config import QUICK, TrainConfig, parse_recipes, pick_framework
from octavo_cli.train.data import read_corpus
from octavo_cli.train.loop import ModelFactory, train_all
from octavo_cli.train.models.backends import noted_backends
from octavo_cli.train.models.model import Model
from octavo_cli.train.report.live import LossTable, print_summary
from octavo_cli.train.report.output import output_folder
from octavo_cli.train.report.results import Results
from octavo_cli.train.stopping import until_stopped
from octavo_registry.cli.output import print_json, print_line


@dataclass(frozen=True, slots=True)
class Choices:
    """The command line's options; `sizes` are those the user set, `fixed` those that have a default."""

    recipes: str
    text: Path | None
    out: Path
    framework: str | None
    device: str
    quick: bool
    as_json: bool
    fixed: Mapping[str, int]
    sizes: Mapping[str, int]


def installed_frameworks() -> tuple[str, ...]:
    """Those of torch and jax whose front end and framework are both installed; neither is imported."""
    return tuple(
        name
        for name in ("torch", "jax")
        if importlib.util.find_spec(name) is not None and importlib.util.find_spec(f"octavo_{name}") is not None
    )


def run_demo(choices: Choices) -> None:
    """Check everything, train, compare, write; prints a summary or, with `as_json`, the results.

    After Ctrl-C the recipes that have finished are compared and written, and KeyboardInterrupt is raised at the end.
    """
    start = time.perf_counter()
    recipes: Mapping[str, Recipe] = parse_recipes(choices.recipes)
    config = TrainConfig(**{**(QUICK if choices.quick else {}), **choices.fixed, **choices.sizes})
    frameworks = installed_frameworks()
    framework = pick_framework(choices.framework, frameworks)
    corpus = read_corpus(choices.text, config.context)
    console = Console(quiet=choices.as_json)
    with output_folder(choices.out) as folder:
        make = model_factory(framework, choices.device)
        console.print(
            f"{config.experts} experts, top {config.top_k}, width {config.width}; {corpus.source}, "
            f"{len(corpus.train) + len(corpus.held_out):,} bytes; {framework} on {choices.device}"
        )
        with noted_backends() as notes, LossTable(console, config, recipes) as table:
            trained = until_stopped(config, recipes, train_all(config, recipes, corpus, make, table))
        config, recipes, runs = trained.config, trained.recipes, trained.runs
        if trained.stopped:
            console.print(f"Stopped: keeping {', '.join(recipes)}; Ctrl-C again writes nothing.")
        console.print("Comparing the quantized weights ...")
        from octavo_cli.train.models.bits import compare_bits, weight_numbers

        first = {run.recipe: run.weights for run in reversed(runs)}
        bits = compare_bits(recipes, first, frameworks)
        results = Results(
            config=config,
            framework=framework,
            device=choices.device,
            recipes={name: _recipe_facts(recipe) for name, recipe in recipes.items()},
            versions=versions(frameworks),
            text={"source": corpus.source, "sha256": corpus.sha256, "bytes": len(corpus.train) + len(corpus.held_out)},
            unigram_loss=corpus.unigram_loss(corpus.evaluation(config.held_out, config.context)),
            runs=runs,
            bits=bits,
            backends=notes.served,
            weights=weight_numbers(recipes, first),
            seconds=time.perf_counter() - start,
            stopped=trained.stopped,
            missing=trained.missing,
        )
        write_report(results, folder, command_line())
    _tell(choices, results)
    if not bits.agree:
        raise RunError(f"the frameworks quantize to different bits; {choices.out / 'curves.json'} says where")
    if trained.stopped:
        raise KeyboardInterrupt


def model_factory(framework: str, device: str) -> ModelFactory:
    """How to make a model in `framework` on `device`; `InputError` where the device is absent."""
    if framework == "torch":
        import torch

        from octavo_cli.train.models.torch_model import TorchModel

        present = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
        factory: Any = TorchModel
        if device == "cpu":
            # Tensors this small gain nothing from threads, and threads that spin for a core lose minutes where the
            # machine is shared.
            torch.set_num_threads(1)
    else:
        import jax

        from octavo_cli.train.models.jax_model import JaxModel

        present = sorted({"cpu", *("cuda" if item.platform == "gpu" else item.platform for item in jax.devices())})
        factory = JaxModel
    if device not in present:
        raise InputError(f"--device is {device!r}; {framework} sees {' and '.join(present)} here")

    def make(config: TrainConfig, recipe: Recipe, vocabulary: int, seed: int) -> Model:
        model: Model = factory(config, recipe, vocabulary, seed, device)
        return model

    return make


def write_report(results: Results, folder: Path, command: str) -> None:
    """curves.json, loss.png, expert_load.png and index.html into `folder`."""
    from octavo_cli.train.report.page import render_page
    from octavo_cli.train.report.plots import load_figure, loss_figure

    (folder / "curves.json").write_text(json.dumps(results.as_dict(), indent=1, allow_nan=False) + "\n")
    (folder / "loss.png").write_bytes(loss_figure(results))
    (folder / "expert_load.png").write_bytes(load_figure(results))
    (folder / "index.html").write_text(render_page(results, command), encoding="utf-8")


def command_line() -> str:
    """The command as it was typed."""
    return shlex.join(["octavo", *sys.argv[1:]])


def _recipe_facts(recipe: Recipe) -> dict[str, Any]:
    return {"fingerprint": recipe.fingerprint, **json.loads(recipe.to_json())}


def versions(frameworks: tuple[str, ...]) -> dict[str, str]:
    """Versions of Python, of our packages and of the frameworks."""
    names = ["octavo", "octavo-numerics", *(f"octavo-{name}" for name in frameworks), *frameworks, "numpy"]
    return {
        "python": ".".join(map(str, sys.version_info[:3])),
        **{name: importlib.metadata.version(name) for name in names},
    }


def _tell(choices: Choices, results: Results) -> None:
    if choices.as_json:
        print_json(results.as_dict())
        return
    print_line()
    print_summary(results)
    print_line(f"Wrote {choices.out / 'index.html'}, the figures and curves.json; {results.seconds:.0f} s.")
