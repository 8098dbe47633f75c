"""explain_exchange: the route that a MoE layer over several ranks takes, and what travels on it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from octavo import Recipe
from octavo.payload import payload_spec
from octavo.quantizer import Operand
from octavo_torch.arrays.checks import brief, check_count, check_dtype
from octavo_torch.arrays.dtypes import DTYPE_NAMES
from octavo_torch.dispatch.recipes import recipe_of
from octavo_torch.moe.parallel.group import GRACE_SECONDS, ExpertGroup, ExpertRanks, expert_group
from octavo_torch.moe.parallel.options import Exchange, RouteName, check_exchange
from octavo_torch.moe.parallel.transports.routes import Route, known_route, route_of, route_of_any


@dataclass(frozen=True)
class ExchangePlan:
    """How a MoE layer exchanges tokens; printable, a line for each thing that is decided.

    route    "collective" or "peer"
    reason   why it is that one, or when it would be
    lines    pairs of what is decided and how
    """

    route: RouteName
    reason: str
    lines: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self.lines)
        return "\n".join([f"{self.route}: {self.reason}", *(f"  {name:<{width}}  {how}" for name, how in self.lines)])


def explain_exchange(
    recipe: Recipe | str | None,
    ranks: int | ExpertRanks,
    exchange: Exchange | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
) -> ExchangePlan:
    """What `moe_mlp(..., recipe=recipe, ep=, exchange=exchange)` does over so many ranks, for tokens of `dtype`.

    ranks    how many, and nothing is sent; or `ep` itself: then every rank asks at once, the first time they tell each
             other where they run, and the route is the one that they take
    device   where tokens are, which need not be here; None: on the current GPU, where there is one

    Raises ValueError for arguments that do not fit.
    """
    recipe = recipe_of(recipe)
    if not isinstance(ranks, dist.ProcessGroup | DeviceMesh):
        check_count("ranks", ranks)
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPE_NAMES:
        raise ValueError(f"dtype is {brief(dtype)}; give torch.bfloat16, torch.float16 or torch.float32")
    check_dtype(dtype)
    options = check_exchange(exchange)
    number = ranks if isinstance(ranks, int) else ranks.size()
    tokens_on = _device(device)
    route = _route(ranks, options, tokens_on)
    return _described(recipe, number, route, options, dtype, tokens_on)


def explain_own_exchange(
    recipe: Recipe, group: ExpertGroup, exchange: Exchange | None, like: torch.Tensor
) -> ExchangePlan:
    """How a layer whose ranks are `group` exchanges tokens like `like`, as far as it is known without asking a rank."""
    options = check_exchange(exchange)
    route = known_route(group, options.route, options.rows is not None, like.device) or Route(
        "peer",
        f"peer memory, if each of {group.ranks} ranks reaches that of the others; the first forward finds out",
    )
    return _described(recipe, group.ranks, route, options, like.dtype, like.device)


def _described(
    recipe: Recipe, ranks: int, route: Route, options: Exchange, dtype: torch.dtype, device: torch.device
) -> ExchangePlan:
    on_gpu = device.type == "cuda"
    once = "once to each rank that has one of its experts"
    sums = options.returns == "sums"
    lines = (
        ("ranks", str(ranks)),
        ("sizes", _sizes(options)),
        ("tokens", f"{_travels(options, 'x', dtype)}, {once}"),
        ("dy", f"{_travels(options, 'dy', dtype)}, likewise"),
        (
            "results, dx",
            f"one partial sum per rank and token in {DTYPE_NAMES[dtype]}, summed at home in fp32"
            if sums
            else f"every choice's row in {DTYPE_NAMES[dtype]}, summed at home in fp32 in the order of the choices",
        ),
        ("bits", _bits(recipe, options, dtype)),
        ("overlap", _OVERLAP[route.name] if on_gpu else _NO_OVERLAP),
        ("faults", _FAULTS[route.name if on_gpu else "collective"]),
    )
    return ExchangePlan(route.name, route.reason, lines)


_OVERLAP: dict[RouteName, str] = {
    "collective": "none: NCCL's kernels and a GEMM's take each other's multiprocessors",
    "peer": "tokens are on their way while weights are quantized and rows get their places, dy while the activation is "
    "made again, and dx while the gradient of w1 is computed",
}
_NO_OVERLAP = "none: on a CPU the ranks wait for each message before they compute on"
_FAULTS: dict[RouteName, str] = {
    "collective": "a rank whose call differs is named at once; a rank that has ended, or does not answer, "
    f"{GRACE_SECONDS:g} s after the group's timeout at the latest",
    "peer": "a rank whose call differs is named at once, or by check_errors where the calls were agreed on before; "
    "where a rank does not come within the group's timeout, CUDA fails in those that wait, with both numbers on stderr",
}


def _device(given: object) -> torch.device:
    """As tensors name it: with the number of the GPU, where there is one. ValueError for what names no device."""
    here = torch.cuda.is_available()
    name = given if given is not None else "cuda" if here else "cpu"
    try:
        device = torch.device(name) if isinstance(name, str) else name
    except RuntimeError:
        device = None
    if not isinstance(device, torch.device):
        raise ValueError(f"device is {brief(given)}; give a torch.device or its name, such as 'cuda'")
    return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") and here else device


def _route(ranks: int | ExpertRanks, options: Exchange, device: torch.device) -> Route:
    """That of a group, or what is known of it without one."""
    static = options.rows is not None
    if not isinstance(ranks, int):
        group = expert_group(ranks)
        assert group is not None  # of what is a group
        return route_of(group, options.route, static, device)
    whoever = route_of_any(options.route, static, device)
    return whoever or Route(
        "peer", f"peer memory, if each of {ranks} ranks reaches that of the others; give ep to know"
    )


def _sizes(options: Exchange) -> str:
    if options.rows is None:
        return (
            "read on the host in every forward, and buffers hold what there is; Exchange(rows=) has static buffers, "
            "which a CUDA graph may hold"
        )
    pairs = "as many as there can be" if options.pair_rows is None else f"{options.pair_rows} rows"
    return (
        f"stay on the devices: {options.rows} rows of each rank's experts, {pairs} of one rank at another; what finds "
        "no room is left out, and check_errors says so"
    )


def _travels(options: Exchange, operand: Operand, dtype: torch.dtype) -> str:
    payload = options.travels_as
    if payload is None:
        return f"as {DTYPE_NAMES[dtype]}"
    return f"as {payload.kind} codes ({payload_spec(payload, operand).format}) and scales"


def _bits(recipe: Recipe, options: Exchange, dtype: torch.dtype) -> str:
    payload = options.travels_as
    if payload is None:
        said = "those of one process"
    else:
        said = "those of one process whose tokens and dy are what the codes stand for"
        if payload == recipe and dtype is not torch.float16 and _decodes_exactly(recipe):
            said += ", and so y, dx and the router's gradient without fc2's bias are those of one process"
    return f"{said}; y and dx within octavo_numerics.partial_sums_bound of them" if options.returns == "sums" else said


def _decodes_exactly(recipe: Recipe) -> bool:
    """Whether products of rows read the same values from codes that were decoded and quantized again: scales that are
    powers of two give them."""
    if recipe.computed_as is not recipe or not (recipe.quantizes("fprop") and recipe.quantizes("dgrad")):
        return False
    specs = [payload_spec(recipe, "x"), payload_spec(recipe, "dy")]
    return all(spec.scaling == "mxfp8" or spec.power_of_two for spec in specs)
