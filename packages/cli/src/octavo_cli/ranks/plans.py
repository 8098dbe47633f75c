"""Which way of spreading experts takes least time, by the model: what `octavo advise --ranks` chooses from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from octavo_cli.ranks.links import H200, Links
from octavo_cli.ranks.step import BUILT, ROUTES, Route, Step, step
from octavo_cli.ranks.traffic import Layer, Spread, Wire

STATE_BYTES = 16
"""Of a parameter: weight and gradient of two bytes each, and fp32 of its master and of Adam's two moments, as ZeRO
counts them (arXiv 1910.02054, section 3.1)."""

REDUCED_BYTES = 6
"""Of a parameter, between replicas: its fp32 gradient on the way to the optimizer's shard, its bf16 weight back."""

UNKNOWN = (
    "rates between hosts are what others published of one 400 Gb/s adapter per rank; untuned or shared networks reach "
    "a half to a fifth of it (--network)",
    "rates within a host are those of two and four H200s; links of more than four at once were not measured",
    "routing is even but for --skew; which rank is busiest changes from step to step",
    "by the collective route nothing overlaps, by peer memory what two GPUs measured, by forwarding all that can, "
    "which nobody measured",
    "what an exchange does in memory besides quantizing and decoding, the host's time, and multiprocessors that copy",
    "attention, the router, shared experts, pipelines, and what of the gradients' reduction hides behind them",
)


@dataclass(frozen=True, slots=True)
class Cluster:
    """What a layer may be spread over.

    ranks           of the job; each group of experts over some of them has replicas on the others
    per_host        ranks that share a host
    layers          MoE layers of a rank
    memory          GB of a rank that its experts may take, with gradients and the optimizer's state: half an H200's
    micro_batches   of one optimizer step, over which the gradients' reduction is spread
    links           between the ranks
    """

    ranks: int
    per_host: int
    layers: int = 1
    memory: float = 70.0
    micro_batches: int = 8
    links: Links = H200


@dataclass(frozen=True, slots=True)
class Plan:
    """One way, and its cost.

    experts     of each rank
    step        of a micro-batch
    gradients   microseconds of a micro-batch's share of the reduction over replicas, nothing of it hidden
    memory      GB of a rank's experts
    """

    spread: Spread
    experts: int
    route: Route
    wire: Wire
    step: Step
    gradients: float
    memory: float

    @property
    def total(self) -> float:
        """Microseconds of a micro-batch."""
        return self.step.total + self.gradients


def plans(layer: Layer, cluster: Cluster, recipe: str, skew: float) -> Iterator[Plan]:
    """Every way whose experts fit, built or not: numbers of ranks that divide the job's and the experts."""
    for ranks in range(1, cluster.ranks + 1):
        if cluster.ranks % ranks or layer.experts % ranks:
            continue
        spread = Spread(ranks, cluster.per_host)
        parameters = 3 * layer.experts / ranks * layer.features * layer.hidden
        memory = cluster.layers * parameters * STATE_BYTES / 1e9
        if memory > cluster.memory:
            continue
        gradients = _gradients_us(parameters, spread, cluster)
        for route in _routes(spread):
            for wire in _wires(recipe, spread):
                cost = step(layer, spread, recipe, wire, route=route, skew=skew, links=cluster.links)
                yield Plan(spread, layer.experts // ranks, route, wire, cost, gradients, memory)


def fastest(candidates: Iterable[Plan], *, built: bool = True, keeps_bits: bool = False) -> Plan | None:
    """The plan of least time; of equal ones that of fewer ranks.

    built        only routes that octavo-torch has; False: only those that it has not
    keeps_bits   only what leaves results those of one process
    """
    fitting = [
        plan
        for plan in candidates
        if (plan.route in BUILT) == built and (plan.wire.keeps_bits or not keeps_bits or plan.spread.ranks == 1)
    ]
    return min(fitting, key=lambda plan: (plan.total, plan.spread.ranks), default=None)


def _routes(spread: Spread) -> tuple[Route, ...]:
    """Those that make sense: stores reach no other host, and forwarding needs one."""
    if spread.ranks == 1:
        return BUILT[:1]
    return tuple(route for route in ROUTES if route != ("peer memory" if spread.hosts > 1 else "forwarded"))


def _wires(recipe: str, spread: Spread) -> tuple[Wire, ...]:
    """As they are, and as codes: the recipe's own where it scales row by row, else those of 1x128."""
    if spread.ranks == 1:
        return (Wire(),)
    codes = recipe if recipe in ("fp8-row", "mxfp8") else "fp8-block"
    return tuple(Wire(payload, returns) for payload in ("bf16", codes) for returns in ("rows", "sums"))


def _gradients_us(parameters: float, spread: Spread, cluster: Cluster) -> float:
    """A reduce-scatter of gradients and an all-gather of weights over R replicas: (1 - 1/R) of the bytes."""
    replicas = cluster.ranks // spread.ranks
    moved = parameters * REDUCED_BYTES * (1 - 1 / replicas)
    rate = cluster.links.network if cluster.ranks > cluster.per_host else cluster.links.collective
    return moved / rate / 1000 / cluster.micro_batches
