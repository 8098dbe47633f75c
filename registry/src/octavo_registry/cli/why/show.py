"""An answer of `octavo why` as tables and sentences."""

from __future__ import annotations

from octavo_registry.cli.output import print_line, print_table
from octavo_registry.cli.why.answer import Answer
from octavo_registry.cli.why.graph import lines
from octavo_registry.cli.why.kernels import show_kernels
from octavo_registry.contract.cards import MOVES, OPTIMIZERS, ROUTERS
from octavo_registry.contract.request import describe_request
from octavo_registry.dispatch.layer_plan import batch_words, computed_words, layer_rows, weight_words

_TITLES = {"mlp": "The MLP", "moe": "The MoE layer"}


def show(answer: Answer) -> None:
    """Print it."""
    decisions, recipe = answer.decisions, answer.question.recipe
    if recipe.computed_as is not recipe:
        print_line(f"{recipe.kind} ({recipe.fingerprint}){computed_words(recipe)}")
        print_line()
    rows = [(d.backend, d.verdict, f"{d.distribution} {d.version}".strip(), d.reason) for d in decisions]
    print_table(answer.question.title(answer.judged), ("backend", "verdict", "from", "reason"), rows)
    if not answer.served and answer.question.op in MOVES | ROUTERS | OPTIMIZERS:
        print_line()
        framework = answer.question.layer.framework
        print_line(f"Layers run without a backend for it: {framework}'s own operations compute {answer.question.op}.")
    if answer.chip is not None:
        print_line()
        print_line(f"This is what backends declare for {answer.chip.name}; no such device was looked at.")
    if answer.emulated:
        print_line()
        for products in answer.emulated:
            print_line(products.sentence("this device" if answer.chip is None else answer.chip.name))
    if rows and answer.ways:
        print_line()
        for line in lines(answer.ways):
            print_line(line)
    _show_changes(answer)
    if answer.missing:
        print_line()
        print_line(answer.missing)
    _show_composition(answer)
    show_kernels(answer.kernels or ())


def _show_changes(answer: Answer) -> None:
    if answer.changes:
        print_line()
        print_line("The nearest change that makes another backend serve:")
        for change in answer.changes:
            print_line(f"  {change.words}: {', '.join(change.backends)}")
    request = answer.question.layer
    if not answer.served and answer.chip is None and request.device != "cpu":
        print_line()
        print_line("`--hypothetical h100` asks for a chip that is not here, by what backends declare alone.")


def _show_composition(answer: Answer) -> None:
    if answer.layer is not None:
        print_line()
        header = ("operation", "backend", "recipe", "how")
        print_table(f"The layer{weight_words(answer.layer)}", header, layer_rows(answer.layer))
        print_line(f"  {batch_words(answer.layer)}")
    elif answer.parts:
        print_line()
        rows = [(part.operation, part.backend or "-", part.recipe or "-", part.how) for part in answer.parts]
        print_table(_TITLES[answer.question.op], ("operation", "backend", "recipe", "how"), rows)
    elif answer.each:
        print_line()
        each = [
            (describe_request(request), one.backend if one else "nothing", one.reason if one else "")
            for request, one in answer.each
        ]
        print_table("Its operations", ("operation", "backend", "reason"), each)
    elif answer.obstacle:
        print_line()
        whole = _TITLES.get(answer.question.op, "The layer")
        print_line(f"{whole} cannot be composed: {answer.obstacle}")
    if answer.exchange:
        print_line()
        print_table("Over ranks", ("what", "how"), list(answer.exchange))
