"""`octavo why`: every backend's verdict on an operation, and the layer that the operation belongs to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, get_args

import typer

import octavo_registry
from octavo import NoBackendError, Recipe
from octavo.formats import DType
from octavo.quantizer import Operand
from octavo.recipe_base import GEMMS
from octavo_registry.cli.errors import BROKEN, BadInput
from octavo_registry.cli.output import Json, print_json, print_line, print_table
from octavo_registry.cli.recipes import complete_recipe, find_recipe
from octavo_registry.cli.why_graph import Ways, lines, ways, ways_json
from octavo_registry.cli.why_kernels import Kernels, ask, kernels_json, show_kernels
from octavo_registry.contract.cards import MOVES, Activation, Norm, Op, Weight
from octavo_registry.contract.plan import Decision, Plan
from octavo_registry.contract.request import GemmRequest, MoveRequest, Request, describe_request
from octavo_registry.contract.weights import WEIGHT_SHAPES, as_it_lies
from octavo_registry.discovery.bridges import framework_record
from octavo_registry.discovery.guard import Fault, guard
from octavo_registry.discovery.names import FRONT_ENDS
from octavo_registry.dispatch.layer_plan import LayerPlan, layer_rows, weight_words
from octavo_registry.dispatch.layer_requests import (
    ACTIVATED,
    activation_request,
    common_fields,
    dequantize_request,
    gemm_request,
    norm_request,
    operand_spec,
    quantize_request,
)

LAYER = "layer"
OPERATIONS: tuple[str, ...] = (*get_args(Op), LAYER)
SIZES: tuple[Literal["host", "device"], ...] = ("host", "device")
Text = TypeVar("Text", bound=str)
_OPERAND_OF: dict[str, Operand] = {"act_quantize": "x", "norm_quantize": "x", "dact_quantize": "dy"}


@dataclass(frozen=True, slots=True)
class Question:
    """A parsed `why`: the operation, and the fprop request of its layer."""

    op: str
    operand: Operand
    layer: GemmRequest
    recipe: Recipe
    activation: Activation
    norm: Norm

    def gemm_requests(self) -> dict[str, GemmRequest]:
        """The GEMMs that the operation is or consists of, by name; BadInput for one without GEMMs."""
        if self.op in GEMMS:
            return {gemm: gemm_request(self.layer, self.recipe, gemm) for gemm in GEMMS if gemm == self.op}
        if self.op != LAYER:
            raise BadInput(f"--kernels: {self.op} is not a GEMM; ask for one of {', '.join((*GEMMS, LAYER))}")
        gemms = GEMMS if self.layer.training else GEMMS[:1]
        return {gemm: gemm_request(self.layer, self.recipe, gemm) for gemm in gemms}

    def request(self) -> Request:
        """The request of the operation itself."""
        if self.op in GEMMS:
            gemm = next(gemm for gemm in GEMMS if gemm == self.op)
            return gemm_request(self.layer, self.recipe, gemm)
        if self.op == LAYER:
            return self.layer
        if self.op in MOVES:
            move = next(move for move in MOVES if move == self.op)
            return MoveRequest(**common_fields(self.layer) | {"op": move, "out_dtype": self.layer.in_dtype})
        operand = _OPERAND_OF.get(self.op, self.operand)
        spec = operand_spec(self.recipe, operand, self.layer.training)
        if spec is None:
            raise BadInput(f"--recipe: {self.recipe.kind} does not quantize {operand}; there is nothing to {self.op}")
        spec = as_it_lies(spec, operand, self.layer.weight)
        quantize = quantize_request(self.layer, spec, operand, ("plain", "plain"))
        if self.op == "norm_quantize":
            return norm_request(quantize, self.norm)
        for op in ACTIVATED:
            if op == self.op:
                return activation_request(quantize, op, self.activation)
        return quantize if self.op == "quantize" else dequantize_request(quantize)


def parse_shape(text: str) -> tuple[int, int, int, int]:
    """M, K, N and G of `--shape`, which is G,K,N,M as in `octavo bench`."""
    parts = text.replace("x", ",").split(",")
    if len(parts) != 4 or not all(part.strip().isdecimal() for part in parts):
        raise BadInput(f"--shape: got {text!r}; give G,K,N,M (groups, in-features, out-features, rows)")
    g, k, n, m = (int(part) for part in parts)
    if min(k, n, g) < 1:
        raise BadInput(f"--shape: got {text!r}; G, K and N are 1 or more")
    return m, k, n, g


def parse_arch(text: str) -> tuple[int, int]:
    """A compute capability written as 9.0, sm_90 or 90."""
    match = re.fullmatch(r"(?:sm_?)?(\d+)\.?(\d)[a-z]?", text.strip().lower())
    if match is None:
        raise BadInput(f"--arch: got {text!r}; write a compute capability as 9.0 or sm_90")
    return int(match[1]), int(match[2])


def one_of(option: str, value: str, allowed: Iterable[Text]) -> Text:
    """The allowed text that equals `value`, with its type; `BadInput` names the option and what is allowed."""
    choices = {str(choice): choice for choice in allowed}
    if value not in choices:
        raise BadInput(f"{option}: got {value!r}; one of {', '.join(choices)}")
    return choices[value]


def _default_framework() -> str:
    names = octavo_registry.framework_names()
    return "torch" if "torch" in names or not names else names[0]


def _weight(framework: str) -> Weight:
    """How the users of a front end keep their kernels."""
    return "kn" if framework == "jax" else "nk"


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
    weight: dict[str, Any] = {"weight": layer.weight, "transposes": layer.transposes}
    return weight | {
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
    recipe: Annotated[str, typer.Option(help="A recipe's name or file.", autocompletion=complete_recipe)],
    shape: Annotated[str, typer.Option(metavar="G,K,N,M", help="Groups, in-features, out-features, rows.")],
    framework: Annotated[str | None, typer.Option(help="torch, jax or another; the installed one by default.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda; this machine's accelerator by default.")] = None,
    arch: Annotated[str | None, typer.Option(help="Compute capability, such as 9.0; the device's by default.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    operand: Annotated[str, typer.Option(help="The operand to quantize: x, w or dy.")] = "x",
    activation: Annotated[str, typer.Option(help="Of act_quantize and dact_quantize.")] = "swiglu",
    norm: Annotated[str, typer.Option(help="Of norm_quantize: rms or layer.")] = "rms",
    weight: Annotated[
        str | None, typer.Option(help="How w lies in memory: nk as [G, N, K], kn as [G, K, N]; the front end's way.")
    ] = None,
    sizes: Annotated[str, typer.Option(help="Where group sizes live: host or device.")] = "device",
    graph: Annotated[bool, typer.Option("--graph", help="Only plans that a CUDA graph may capture.")] = False,
    inference: Annotated[bool, typer.Option("--inference", help="Forward only: no gradients.")] = False,
    backend: Annotated[
        list[str] | None, typer.Option(help="Ask with this closed preference; repeat, or separate by commas.")
    ] = None,
    kernels: Annotated[bool, typer.Option("--kernels", help="Also the kernels or tiles of each GEMM.")] = False,
    rows: Annotated[int | None, typer.Option(help="M for --kernels.", show_default="M of --shape")] = None,
    as_json: Json = False,
) -> None:
    """Every backend's verdict on an operation, with the reason.

    For a GEMM, `layer` and `mlp` it also shows which backends the whole layer would be composed of, and on CUDA who
    serves eager calls and who those that a CUDA graph captures, with `--graph` and without. With `--kernels`
    it shows what the backend chooses from for each GEMM, with the time that its model expects.
    Exits with 1 where nothing serves the operation.
    """
    one_of("OP", op, OPERATIONS)
    m, k, n, groups = parse_shape(shape)
    if rows is not None and not kernels:
        raise BadInput("--rows is for --kernels; give both, or neither")
    if rows is not None and rows < 0:
        raise BadInput(f"--rows: got {rows}; 0 or more")
    chosen = find_recipe(recipe)
    name = framework or _default_framework()
    kind, capability = _device(name, device, arch)
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
    _answer(question, names, (m if rows is None else rows) if kernels else None, as_json)


def _answer(question: Question, backend: Sequence[str] | None, rows: int | None, as_json: bool) -> None:
    request = question.request()
    gemms = {} if rows is None else question.gemm_requests()
    decisions = octavo_registry.explain(request, backend=backend)
    served = any(decision.verdict == "chosen" for decision in decisions)
    layer: LayerPlan | None = None
    obstacle = ""
    if question.op in (*GEMMS, LAYER):
        try:
            layer = octavo_registry.plan_layer(question.layer, backend=backend)
        except NoBackendError as error:
            obstacle = str(error)
        if question.op == LAYER:
            served = layer is not None
    both = ways(request, decisions, backend)
    kernels: list[Kernels] = [] if rows is None else ask(gemms, rows, backend)
    if as_json:
        print_json(
            {
                "request": request_json(request),
                "served": served,
                "decisions": [decision_json(decision) for decision in decisions],
                "ways": ways_json(both),
                "layer": layer_json(layer) if layer is not None else None,
                "layer_error": obstacle or None,
                **({} if rows is None else {"kernels": kernels_json(kernels)}),
            }
        )
    else:
        _show(request, decisions, both, layer, obstacle)
        show_kernels(kernels)
    if not served:
        raise typer.Exit(BROKEN)


def _show(request: Request, decisions: Sequence[Decision], both: Ways, layer: LayerPlan | None, obstacle: str) -> None:
    rows = [(d.backend, d.verdict, f"{d.distribution} {d.version}".strip(), d.reason) for d in decisions]
    print_table(describe_request(request), ("backend", "verdict", "from", "reason"), rows)
    if not rows and request.framework in FRONT_ENDS:
        print_line(f"  no backend is installed: pip install {FRONT_ENDS[request.framework]}")
    if rows and both:
        print_line()
        for line in lines(both):
            print_line(line)
    if layer is not None:
        print_line()
        print_table(f"The layer{weight_words(layer)}", ("operation", "backend", "recipe", "layouts"), layer_rows(layer))
    elif obstacle:
        print_line()
        print_line(f"The layer cannot be composed: {obstacle}")
