"""`octavo why`: every backend's verdict on an operation, and the layer, MLP or MoE layer that it belongs to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, get_args

import typer

import octavo_registry
from octavo.errors import one_of
from octavo.formats import DType
from octavo.quantizer import Operand
from octavo_registry.cli.errors import BROKEN, BadInput
from octavo_registry.cli.output import Json, print_json
from octavo_registry.cli.recipes import complete_recipe, find_recipe
from octavo_registry.cli.tracebacks import tracebacks
from octavo_registry.cli.why.answer import answer, suppose
from octavo_registry.cli.why.chips import parse_arch, parse_chip
from octavo_registry.cli.why.question import MOE, OPERATIONS, SIZES, Question, check_options, parse_shape
from octavo_registry.cli.why.ranks import ask_ranks
from octavo_registry.cli.why.show import show
from octavo_registry.contract.cards import MOVES, OPTIMIZERS, ROUTERS, Activation, Capability, Norm, Weight
from octavo_registry.contract.request import GemmRequest
from octavo_registry.discovery.bridges import framework_record
from octavo_registry.discovery.guard import Fault, guard
from octavo_registry.discovery.names import FRONT_ENDS


def _default_framework() -> str:
    names = octavo_registry.framework_names()
    return "torch" if "torch" in names or not names else names[0]


def _weight(framework: str) -> Weight:
    """How the users of a front end keep their kernels."""
    return "kn" if framework == "jax" else "nk"


def _sizes(op: str, framework: str, device: str) -> Literal["host", "device"]:
    """Where a front end has the group sizes: torch's a CPU's in host memory, JAX's traced wherever they are.

    Requests for operations without groups leave the field as it is.
    """
    grouped = op not in MOVES | ROUTERS | OPTIMIZERS
    return "host" if grouped and framework == "torch" and device == "cpu" else "device"


def _rows() -> Iterator[Capability]:
    """What the cards of all backends declare."""
    for record in octavo_registry.backends():
        if record.card is not None:
            yield from record.card.capabilities


def _known_framework(name: str) -> str:
    """`name`; BadInput where neither a front end nor a card knows it."""
    known = {row.framework for row in _rows()} | set(FRONT_ENDS) | set(octavo_registry.framework_names())
    return one_of("--framework", name, sorted(known), BadInput)


def _known_device(name: str) -> str:
    """`name`; BadInput where no card knows it: frameworks call a GPU cuda."""
    return one_of("--device", name, sorted({row.device for row in _rows()} | {"cpu", "cuda"}), BadInput)


def _device(framework: str, device: str | None, arch: str | None) -> tuple[str, tuple[int, int] | None]:
    """The device to ask for: the first accelerator that the framework sees, where none is named."""
    if device is not None:
        device = _known_device(device)
    if device is not None and arch is not None and device != "cpu":
        return device, parse_arch(arch)
    if device == "cpu" and arch is None:
        return device, None
    record = framework_record(framework)
    devices: Sequence[Any] = ()
    if record is not None and record.bridge is not None:
        try:
            devices = guard(record.bridge.devices)
        except Fault as fault:
            raise BadInput(f"--device: {framework} cannot list its devices ({fault}); name one") from fault
    if device is None:
        device = next((d.kind for d in devices if d.kind != "cpu"), "cpu")
    if device == "cpu" and arch is not None:
        parse_arch(arch)
        raise BadInput(
            f"--arch: got {arch}, and the device is a cpu, which has no compute capability; give --device cuda, too, "
            "or --hypothetical with a chip's name"
        )
    seen = next((d.arch for d in devices if d.kind == device), None)
    return device, parse_arch(arch) if arch else seen


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
    operand: Annotated[
        str | None, typer.Option(help="For quantize and dequantize: x, w or dy.", show_default="x")
    ] = None,
    activation: Annotated[
        str | None, typer.Option(help="For act_quantize, dact_quantize, mlp and moe.", show_default="swiglu")
    ] = None,
    norm: Annotated[str | None, typer.Option(help="For norm_quantize: rms or layer.", show_default="rms")] = None,
    weight: Annotated[
        str | None, typer.Option(help="How w is stored: nk as [G, N, K], torch's default; kn as [G, K, N], JAX's.")
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option(
            help="Where group sizes are: host or device.",
            show_default="where layers have them: for torch on a CPU the host, else the device",
        ),
    ] = None,
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
    one_of("OP", op, OPERATIONS, BadInput)
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
    in_dtype: DType = one_of("--dtype", dtype, get_args(DType), BadInput)
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
        sizes=one_of("--sizes", sizes or _sizes(op, name, kind), SIZES, BadInput),
        graph_safe=graph,
        training=not inference,
        weight=one_of("--weight", weight or _weight(name), get_args(Weight), BadInput),
    )
    which: Operand = one_of("--operand", operand or "x", get_args(Operand), BadInput)
    function: Activation = one_of("--activation", activation or "swiglu", get_args(Activation), BadInput)
    normalization: Norm = one_of("--norm", norm or "rms", get_args(Norm), BadInput)
    check_options(op, operand=operand, activation=activation, norm=norm)
    question = Question(op, which, layer, chosen, function, normalization)
    names = tuple(part.strip() for text in backend or () for part in text.split(",")) or None
    with tracebacks(traceback):
        if chip is not None:
            found = suppose(question, names, chip)
        else:
            found = answer(question, names, (m if rows is None else rows) if kernels else None)
        if ranks is not None:
            found = replace(found, exchange=ask_ranks(question, ranks))
    if as_json:
        print_json(found.as_json())
    else:
        show(found)
    if not found.served:
        raise typer.Exit(BROKEN)
