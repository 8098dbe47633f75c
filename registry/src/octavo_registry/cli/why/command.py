"""`octavo why`: every backend's verdict on an operation, and the layer, MLP or MoE layer that it belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, get_args

import typer

import octavo_registry
from octavo import NoBackendError
from octavo.formats import DType
from octavo.quantizer import Operand
from octavo.recipe_base import GEMMS
from octavo_registry.cli.errors import BROKEN, BadInput
from octavo_registry.cli.output import Json, print_json, print_line, print_table
from octavo_registry.cli.recipes import complete_recipe, find_recipe
from octavo_registry.cli.tracebacks import tracebacks
from octavo_registry.cli.why.changes import Change, nearest_changes, serves_elsewhere, serves_here
from octavo_registry.cli.why.chips import Chip, parse_arch, parse_chip
from octavo_registry.cli.why.graph import Ways, lines, ways, ways_json
from octavo_registry.cli.why.kernels import Kernels, ask, kernels_json, show_kernels
from octavo_registry.cli.why.parts import Part, compose_parts
from octavo_registry.cli.why.question import COMPOSED, LAYER, MOE, OPERATIONS, SIZES, Question, one_of, parse_shape
from octavo_registry.cli.why.ranks import ask_ranks
from octavo_registry.contract.cards import MOVES, OPTIMIZERS, ROUTERS, Activation, Norm, Weight
from octavo_registry.contract.plan import Decision, Plan, decision_table
from octavo_registry.contract.request import GemmRequest, Request, describe_request
from octavo_registry.contract.weights import WEIGHT_SHAPES
from octavo_registry.discovery.bridges import framework_record
from octavo_registry.discovery.guard import Fault, guard
from octavo_registry.discovery.names import FRONT_ENDS
from octavo_registry.dispatch.layer_plan import LayerPlan, batch_words, computed_words, layer_rows, weight_words

_TITLES = {"mlp": "The MLP", "moe": "The MoE layer"}


def _default_framework() -> str:
    names = octavo_registry.framework_names()
    return "torch" if "torch" in names or not names else names[0]


def _weight(framework: str) -> Weight:
    """How the users of a front end keep their kernels."""
    return "kn" if framework == "jax" else "nk"


def _known_framework(name: str) -> str:
    """`name`; BadInput where neither a front end nor a card knows it."""
    cards = (record.card for record in octavo_registry.backends() if record.card is not None)
    served = {row.framework for card in cards for row in card.capabilities}
    return one_of("--framework", name, sorted(served | set(FRONT_ENDS) | set(octavo_registry.framework_names())))


def _device(framework: str, device: str | None, arch: str | None) -> tuple[str, tuple[int, int] | None]:
    """The device to ask for: the first accelerator that the framework sees, where none is named."""
    if device == "cpu" or (device is not None and arch is not None):
        return device, parse_arch(arch) if arch else None
    record = framework_record(framework)
    devices: Sequence[Any] = ()
    if record is not None and record.bridge is not None:
        try:
            devices = guard(record.bridge.devices)
        except Fault as fault:
            raise BadInput(f"--device: {framework} cannot list its devices ({fault}); name one") from fault
    if device is None:
        device = next((d.kind for d in devices if d.kind != "cpu"), "cpu")
    seen = next((d.arch for d in devices if d.kind == device), None)
    return device, parse_arch(arch) if arch else seen


def layer_json(layer: LayerPlan) -> dict[str, Any]:
    """A composition as JSON."""
    plans: dict[str, Plan | None] = dict((*layer.quantizers, *layer.gemms))
    whole: dict[str, Any] = {
        "weight": layer.weight,
        "transposes": layer.transposes,
        "batch_invariant": layer.batch_invariant,
    }
    return whole | {
        name: plan
        and {
            "backend": plan.backend,
            "recipe": plan.request.kind,
            "layouts": dict(zip(("rowwise", "columnwise"), plan.request.layouts, strict=True))
            if name.startswith("quantize")
            else dict(plan.layouts),
            "note": plan.note,
        }
        for name, plan in plans.items()
    }


def request_json(request: Request) -> dict[str, Any]:
    """A request as JSON."""
    return {
        "op": request.op,
        "recipe": request.kind,
        "framework": request.framework,
        "device": request.device,
        "arch": list(request.arch) if request.arch else None,
        "in_dtype": request.in_dtype,
        "out_dtype": request.out_dtype,
        "k": request.k,
        "n": request.n,
        "groups": request.groups,
        "sizes": request.sizes,
        "graph_safe": request.graph_safe,
        "training": request.training,
        "weight": request.weight,
        "activation": request.activation,
        "norm": request.norm,
    }


def decision_json(decision: Decision) -> dict[str, str]:
    """A verdict as JSON."""
    return {
        "backend": decision.backend,
        "distribution": decision.distribution,
        "version": decision.version,
        "verdict": decision.verdict,
        "reason": decision.reason,
    }


def why(
    op: Annotated[str, typer.Argument(metavar="OP", help=f"One of {', '.join(OPERATIONS)}.")],
    recipe: Annotated[
        str | None,
        typer.Option(
            help="A recipe's name or file.",
            autocompletion=complete_recipe,
            show_default="none, for operations that have no recipe; required for the others",
        ),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            metavar="G,K,N,M",
            help="Groups, in-features, out-features, rows; for mlp and moe G,K,F,M with F hidden features.",
            show_default="any shape",
        ),
    ] = None,
    framework: Annotated[str | None, typer.Option(help="torch, jax or another; the installed one by default.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda; this machine's accelerator by default.")] = None,
    arch: Annotated[str | None, typer.Option(help="Compute capability, such as 9.0; the device's by default.")] = None,
    hypothetical: Annotated[
        str | None,
        typer.Option(metavar="CHIP", help="Ask about a chip that is not here, such as h100."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    operand: Annotated[str, typer.Option(help="The operand to quantize: x, w or dy.")] = "x",
    activation: Annotated[str, typer.Option(help="For act_quantize, dact_quantize, mlp and moe.")] = "swiglu",
    norm: Annotated[str, typer.Option(help="For norm_quantize: rms or layer.")] = "rms",
    weight: Annotated[
        str | None, typer.Option(help="How w is stored: nk as [G, N, K], torch's default; kn as [G, K, N], JAX's.")
    ] = None,
    sizes: Annotated[str, typer.Option(help="Where group sizes are: host or device.")] = "device",
    graph: Annotated[bool, typer.Option("--graph", help="Only plans that a CUDA graph may hold.")] = False,
    inference: Annotated[bool, typer.Option("--inference", help="Forward only: no gradients.")] = False,
    backend: Annotated[
        list[str] | None, typer.Option(help="Admit only these backends, best first; repeat, or use commas.")
    ] = None,
    kernels: Annotated[bool, typer.Option("--kernels", help="Also list the kernels or tiles of each GEMM.")] = False,
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Also print tracebacks of what failed in plugins, on stderr.")
    ] = False,
    rows: Annotated[int | None, typer.Option(help="M for --kernels.", show_default="M of --shape")] = None,
    ranks: Annotated[
        int | None, typer.Option(help="For moe: also what is exchanged with experts on this many ranks.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Which backend serves an operation, why the others do not, and what would let a better one serve.

    For a GEMM and for `layer` it also shows which backends the whole layer is composed of; for `mlp` and `moe` it shows
    the whole expert MLP or MoE layer, with what is fused in it. On CUDA it says who serves eager calls and who serves
    calls that a CUDA graph captures. With `--kernels` it lists the kernels that the backend chooses from for each GEMM,
    with the time that its model predicts. `--hypothetical` is answered from the cards and shape rules of backends, and
    looks at no device. The exit code is 1 if nothing serves the operation.
    """
    one_of("OP", op, OPERATIONS)
    m, k, n, groups = (None, None, None, None) if shape is None else parse_shape(shape)
    if rows is not None and not kernels:
        raise BadInput("--rows is for --kernels; give both, or neither")
    if rows is not None and rows < 0:
        raise BadInput(f"--rows: got {rows}; 0 or more")
    if kernels and shape is None:
        raise BadInput("--kernels depends on the shape; give --shape G,K,N,M, too")
    if hypothetical is not None and (device is not None or arch is not None or kernels):
        raise BadInput("--hypothetical names the whole device, and its kernels are not asked; leave out --device, "
                       "--arch and --kernels")  # fmt: skip
    if ranks is not None and (op != MOE or ranks < 1):
        raise BadInput(f"--ranks: got {ranks} for {op}; 1 or more, and for moe alone")
    if recipe is None and op not in MOVES | ROUTERS | OPTIMIZERS:
        raise BadInput(f"Missing option '--recipe': {op} depends on one; give a preset's name or a file")
    chosen = find_recipe(recipe or "bf16")
    name = _default_framework() if framework is None else _known_framework(framework)
    chip = None if hypothetical is None else parse_chip(hypothetical)
    kind, capability = _device(name, device, arch) if chip is None else (chip.kind, chip.arch)
    in_dtype: DType = one_of("--dtype", dtype, get_args(DType))
    layer = GemmRequest(
        op="fprop",
        framework=name,
        device=kind,
        in_dtype=in_dtype,
        out_dtype=chosen.output_dtype or in_dtype,
        recipe=chosen,
        arch=capability,
        k=k,
        n=n,
        groups=groups,
        sizes=one_of("--sizes", sizes, SIZES),
        graph_safe=graph,
        training=not inference,
        weight=one_of("--weight", weight or _weight(name), WEIGHT_SHAPES),
    )
    which: Operand = one_of("--operand", operand, get_args(Operand))
    function: Activation = one_of("--activation", activation, get_args(Activation))
    normalization: Norm = one_of("--norm", norm, get_args(Norm))
    question = Question(op, which, layer, chosen, function, normalization)
    names = tuple(part.strip() for text in backend or () for part in text.split(",")) or None
    with tracebacks(traceback):
        if chip is not None:
            answer = _suppose(question, names, chip)
        else:
            answer = _answer(question, names, (m if rows is None else rows) if kernels else None)
        if ranks is not None:
            answer = replace(answer, exchange=ask_ranks(question, ranks))
    if as_json:
        print_json(answer.as_json())
    else:
        _show(answer)
    if not answer.served:
        raise typer.Exit(BROKEN)


@dataclass(frozen=True, slots=True)
class Answer:
    """What `octavo why` has found out.

    layer     the composition of a GEMM's or a layer's question; None where it cannot be composed or was not asked
    parts     of an MLP or a MoE layer
    obstacle  why the composition fails; "" otherwise
    kernels   None where they were not asked for
    chip      of `--hypothetical`
    each      of a hypothetical composition: who would serve each of its requests
    exchange  of `--ranks`: what a MoE layer exchanges, and how
    """

    question: Question
    served: bool
    decisions: Sequence[Decision]
    ways: Ways
    changes: Sequence[Change]
    layer: LayerPlan | None = None
    parts: Sequence[Part] = ()
    obstacle: str = ""
    kernels: Sequence[Kernels] | None = None
    chip: Chip | None = None
    each: Sequence[tuple[Request, Decision | None]] = ()
    exchange: Sequence[tuple[str, str]] = ()

    def as_json(self) -> dict[str, Any]:
        """The document of `--json`."""
        document = {
            "request": request_json(self.question.request()),
            "asked_for": {"recipe": self.question.recipe.kind, "fingerprint": self.question.recipe.fingerprint},
            "served": self.served,
            "decisions": [decision_json(decision) for decision in self.decisions],
            "ways": ways_json(self.ways),
            "changes": [asdict(change) for change in self.changes],
            "layer": None if self.layer is None else layer_json(self.layer),
            "layer_error": self.obstacle or None,
        }
        if self.parts:
            document["parts"] = [asdict(part) for part in self.parts]
        if self.exchange:
            document["exchange"] = dict(self.exchange)
        if self.kernels is not None:
            document["kernels"] = kernels_json(self.kernels)
        if self.chip is not None:
            document["hypothetical"] = self.chip.name
            document["operations"] = [
                {"request": request_json(request), "backend": None if one is None else one.backend}
                for request, one in self.each
            ]
        return document


def _answer(question: Question, backend: Sequence[str] | None, rows: int | None) -> Answer:
    """The verdicts of this machine."""
    request = question.request()
    gemms = {} if rows is None else question.gemm_requests()
    decisions = octavo_registry.explain(request, backend=backend)
    served = any(decision.verdict == "chosen" for decision in decisions)
    layer: LayerPlan | None = None
    parts: list[Part] = []
    obstacle = ""
    try:
        if question.op in (*GEMMS, LAYER):
            layer = octavo_registry.plan_layer(question.layer, backend=backend)
        elif question.op in COMPOSED:
            parts = compose_parts(question, backend)
    except NoBackendError as error:
        # the verdicts that stand above are not said twice
        repeated = decision_table(error.decisions) == decision_table(decisions)
        obstacle = str(error).splitlines()[0] if repeated else str(error)
    if question.op in COMPOSED:
        served = not obstacle
    changes = [] if backend else nearest_changes(question, decisions, serves_here)
    return Answer(
        question,
        served,
        decisions,
        ways(request, decisions, backend),
        changes,
        layer,
        parts,
        obstacle,
        None if rows is None else ask(gemms, rows, backend),
    )


def _suppose(question: Question, backend: Sequence[str] | None, chip: Chip) -> Answer:
    """What cards and shape rules say of a chip that need not be here. Nothing is bound, so there are no layouts."""
    decisions = octavo_registry.hypothesize(question.request(), backend=backend)
    each = []
    for request in question.requests() if question.op in COMPOSED else ():
        verdicts = octavo_registry.hypothesize(request, backend=backend)
        each.append((request, next((one for one in verdicts if one.verdict == "chosen"), None)))
    served = all(one for _, one in each) if each else any(one.verdict == "chosen" for one in decisions)
    changes = [] if backend else nearest_changes(question, decisions, serves_elsewhere)
    return Answer(question, served, decisions, {}, changes, chip=chip, each=each)


def _show(answer: Answer) -> None:
    request, decisions, recipe = answer.question.request(), answer.decisions, answer.question.recipe
    if recipe.computed_as is not recipe:
        print_line(f"{recipe.kind} ({recipe.fingerprint}){computed_words(recipe)}")
        print_line()
    rows = [(d.backend, d.verdict, f"{d.distribution} {d.version}".strip(), d.reason) for d in decisions]
    print_table(describe_request(request), ("backend", "verdict", "from", "reason"), rows)
    if not rows and request.framework in FRONT_ENDS:
        print_line(f"  no backend is installed: pip install {FRONT_ENDS[request.framework]}")
    if answer.chip is not None:
        print_line()
        print_line(f"By cards and shape rules for {answer.chip.name}; no such machine was asked.")
    if rows and answer.ways:
        print_line()
        for line in lines(answer.ways):
            print_line(line)
    _show_changes(answer)
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
        print_line("`--hypothetical h100` asks for a chip that is not here: cards and shape rules alone.")


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
