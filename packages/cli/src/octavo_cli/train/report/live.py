"""The loss table in the terminal: live where there is one, one line an evaluation where output goes to a file."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from octavo_cli.train.config import BASELINE, TrainConfig
from octavo_cli.train.report.results import SEED_SPREAD, Results, Run
from octavo_registry.cli.output import print_line, print_table


class LossTable:
    """A `Watcher` that draws one row per (recipe, seed)."""

    def __init__(self, console: Console, config: TrainConfig, recipes: Iterable[str]) -> None:
        self._console, self._config = console, config
        self._rows: dict[tuple[str, int], Run | None] = {
            (recipe, seed): None for seed in config.all_seeds for recipe in recipes
        }
        self._done: set[tuple[str, int]] = set()
        self._live = Live(console=console, auto_refresh=False, transient=False) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
            self._draw()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def stepped(self, run: Run) -> None:
        """A step ended."""
        self._rows[run.recipe, run.seed] = run
        self._draw()

    def evaluated(self, run: Run) -> None:
        """An evaluation ended."""
        self._draw()
        if self._live is None:
            step, loss = run.evaluations[-1].step, run.evaluations[-1].loss
            self._console.print(
                f"{run.recipe:<12} seed {run.seed}  step {step:>4}/{self._config.steps}  "
                f"train {run.losses[-1]:.4f}  held out {loss:.4f}"
            )

    def finished(self, run: Run) -> None:
        """The run ended."""
        self._done.add((run.recipe, run.seed))
        self._draw()

    def _draw(self) -> None:
        if self._live is not None:
            self._live.update(self._table(), refresh=True)

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, header_style="dim")
        many = self._config.seeds > 1
        table.add_column("recipe", no_wrap=True)
        if many:
            table.add_column("seed", justify="right")
        for name in ("step", "train", "held out", "gap to bf16"):
            table.add_column(name, justify="right", no_wrap=True, min_width=8)
        table.add_column("", width=22)
        for (recipe, seed), run in self._rows.items():
            cells = [recipe, str(seed)] if many else [recipe]
            steps = len(run.losses) if run else 0
            cells += [
                f"{steps}/{self._config.steps}",
                f"{run.losses[-1]:.4f}" if run and run.losses else "",
                f"{run.final.loss:.4f}" if run and run.evaluations else "",
                self._gap(recipe, seed, run),
            ]
            bar = ProgressBar(total=self._config.steps, completed=steps, width=20)
            table.add_row(*cells, bar, style="" if run else "dim")
        return table

    def _gap(self, recipe: str, seed: int, run: Run | None) -> str:
        base = self._rows[BASELINE, seed]
        if run is None or base is None or recipe == BASELINE or not run.evaluations:
            return ""
        against = base.evaluations[len(run.evaluations) - 1].loss
        return f"{100 * (run.final.loss / against - 1):+.2f} %"


class RunLines:
    """A `Watcher` that prints one line for each run that has ended."""

    def stepped(self, run: Run) -> None:
        """Nothing: a step is not worth a line."""

    def evaluated(self, run: Run) -> None:
        """Nothing: neither is an evaluation."""

    def finished(self, run: Run) -> None:
        """The recipe, the seed, the held-out loss and the time."""
        print_line(f"{run.recipe:<14} seed {run.seed}  held out {run.final.loss:.4f}  {run.seconds:.1f} s")


def print_summary(results: Results) -> None:
    """Summary of a run: held-out loss, gap with its spread, and the comparison of bits."""
    rows = []
    for name in results.recipes:
        gap = results.gaps.get(name)
        bits = results.bits.of(name)
        weights = results.weights.get(name, {}).values()
        rows.append(
            (
                name,
                f"{results.held_out(name):.4f}",
                f"{gap.percent:+.2f} %" if gap else "baseline",
                f"± {gap.spread:.2f} %" if gap else "",
                f"{min(numbers['sqnr_db'] for numbers in weights):.1f} dB" if weights else "",
                bits.sentence,
            )
        )
    header = ("recipe", "held-out loss", "gap to bf16", "spread", "SQNR", "bits of the trained weights")
    print_table("Held-out cross entropy, nats per byte", header, rows)
    print_line(f"ran on {', '.join(results.backends) or 'the framework alone'}; SQNR: of the trained expert weights")
    gaps = list(results.gaps.values())
    if gaps:
        kind = "standard deviation" if len(gaps[0].per_seed) > 1 else "standard error"
        print_line(f"spread: one {kind} over {gaps[0].spread_over}; byte frequencies alone: {results.unigram_loss:.4f}")
        if len(gaps[0].per_seed) == 1:
            low, high = SEED_SPREAD
            print_line(
                f"other seeds move the gap by {low} to {high} % (measured: 3 seeds, 200 steps); --seeds 3 shows it"
            )
