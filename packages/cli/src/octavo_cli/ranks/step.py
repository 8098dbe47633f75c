"""A step of a MoE layer over ranks: forward and backward of one layer and one micro-batch, in microseconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from octavo_cli.ranks.links import COPY, H200, Links
from octavo_cli.ranks.rates import RATES, compute_us
from octavo_cli.ranks.traffic import (
    SIGNATURE_BYTES,
    Layer,
    Spread,
    Wire,
    bytes_by_phase,
    collectives,
    reached,
    row_bytes,
)

Route = Literal["collective", "peer memory", "forwarded"]
ROUTES: tuple[Route, ...] = get_args(Route)
BUILT: tuple[Route, ...] = ("collective", "peer memory")
"""What octavo-torch has. "forwarded" is how DeepEP crosses hosts: a token goes once to each host over the network, and
from there to its ranks over the host's links."""

HIDES: Mapping[Route, Mapping[str, float]] = {
    "collective": {},
    "peer memory": {"dx": 2 / 9},
    "forwarded": {"tokens": 2 / 9, "results": 1 / 9, "dy": 1 / 9, "dx": 5 / 9},
}
"""The share of a layer's GEMMs that runs beside each exchange: by peer memory fc1's wgrad; where tokens are forwarded
all that can, fc1, fc2, dgrad of fc2, dgrad of fc1 with all wgrads."""

WEIGHT_BYTES = 4
"""That quantizing moves per element of a weight: two read, one written to each plane."""

OWN_PASSES: Mapping[Route, int] = {"collective": 70, "peer memory": 45, "forwarded": 70}
"""Within a host: reads and writes of a rank's tokens that take as long as a step's picking, keeping and summing of
rows, its small kernels among them, fitted to steps over two GPUs (see `published`)."""

ALL_PASSES = 10
"""Those of static buffers with all ranks' tokens: a copy of those that arrive, sums that are written and sent, twice,
and dy, which is read twice."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One exchange of the busiest rank.

    within    bytes that travel over the links of its host
    beyond    bytes that leave its host
    us        how long it takes
    exposed   how much of it computing cannot hide: all of it by the collective route, and the least there can be by
              others
    """

    name: str
    within: float
    beyond: float
    us: float
    exposed: float


@dataclass(frozen=True, slots=True)
class Step:
    """The step of the rank that is busiest, for which all others wait.

    compute   of its experts, forward and backward
    codes     of quantizing tokens and dy for the exchange and of decoding those that arrive; within a host also of
              rows on their way through memory
    phases    the four exchanges; none where there is one rank
    """

    compute: float
    codes: float
    phases: tuple[Phase, ...]

    @property
    def exchange(self) -> float:
        """Microseconds of the exchanges."""
        return sum(phase.us for phase in self.phases)

    @property
    def exposed(self) -> float:
        """Microseconds in which a rank does not compute its experts."""
        return self.codes + sum(phase.exposed for phase in self.phases)

    @property
    def total(self) -> float:
        """Microseconds of the step."""
        return self.compute + self.exposed

    @property
    def within(self) -> float:
        """Bytes over the links of a host."""
        return sum(phase.within for phase in self.phases)

    @property
    def beyond(self) -> float:
        """Bytes that leave a host."""
        return sum(phase.beyond for phase in self.phases)


def exchange_us(within: float, beyond: float, messages: int, route: Route, links: Links) -> float:
    """Microseconds of an exchange: its slower link, and a fixed time for each of its `messages`."""
    if not within and not beyond:
        return 0.0
    inside = links.collective if route == "collective" else links.peer
    fixed = links.network_us if beyond else links.collective_us if route == "collective" else links.barrier_us
    return max(within / inside, beyond / links.network) / 1000 + messages * fixed


def step(
    layer: Layer,
    spread: Spread,
    recipe: str,
    wire: Wire | None = None,
    *,
    route: Route = "collective",
    skew: float = 1.0,
    links: Links = H200,
) -> Step:
    """What the busiest rank does.

    recipe   whose `RATES` are taken
    skew     rows of the busiest rank, of an even share; what it receives grows as much. No rank has more than all rows

    compute = the fit of `compute_us` for skew T k rows of E / N experts.
    An exchange = skew max(bytes within / rate within, bytes beyond / rate beyond) + messages * fixed time.
    """
    wire = wire or Wire()
    skew = min(skew, spread.ranks)
    experts = layer.experts / spread.ranks
    rows = layer.tokens * layer.choices * skew
    compute = compute_us(RATES[recipe], rows, experts, (layer.features, layer.hidden))
    if spread.ranks == 1:
        return Step(compute, 0.0, ())
    within, beyond = _travelling(layer, spread, wire, route)
    messages = collectives(wire) if route == "collective" else dict.fromkeys(within, 1)
    phases = []
    for name in within:
        near, far = skew * within[name], skew * beyond[name]
        us = exchange_us(near, far, messages[name], route, links)
        hidden = compute * HIDES[route].get(name, 0.0)
        if route == "peer memory" and name == "tokens":
            hidden += _weights_us(layer, spread, recipe)
        fixed = us - exchange_us(near, far, 0, route, links)
        phases.append(Phase(name, near, far, us, max(us - hidden, fixed)))
    aside = _codes_us(layer, spread, wire) * skew
    if spread.hosts == 1:
        passes = OWN_PASSES[route] + ALL_PASSES * spread.ranks
        aside += passes * 2 * layer.tokens * layer.features / COPY / 1000
    return Step(compute, aside, tuple(phases))


def _travelling(layer: Layer, spread: Spread, wire: Wire, route: Route) -> tuple[dict[str, float], dict[str, float]]:
    """Bytes by exchange, within a host and beyond it."""
    copies = layer.tokens * reached(layer, spread.ranks) / spread.ranks  # to each rank
    rows = layer.tokens * layer.choices / spread.ranks
    here, elsewhere = spread.within - 1, spread.ranks - spread.within
    if route != "forwarded" or not elsewhere:
        within = bytes_by_phase(layer, wire, copies * here, rows * here)
        beyond = bytes_by_phase(layer, wire, copies * elsewhere, rows * elsewhere)
    else:  # a host's rank of the same number passes on what its neighbours need
        share = (spread.within - 1) / spread.within
        within = bytes_by_phase(layer, wire, copies * spread.ranks * share, rows * spread.ranks * share)
        once = layer.tokens * reached(layer, spread.hosts) * (spread.hosts - 1) / spread.hosts
        beyond = bytes_by_phase(layer, wire, once, rows * elsewhere)
    near, far = dict(within), dict(beyond)
    near["tokens"] += SIGNATURE_BYTES * here
    far["tokens"] += SIGNATURE_BYTES * elsewhere
    return near, far


def _weights_us(layer: Layer, spread: Spread, recipe: str) -> float:
    """Quantizing a rank's weights, while its tokens are on their way."""
    if recipe == "bf16":
        return 0.0
    return 3 * layer.experts / spread.ranks * layer.features * layer.hidden * WEIGHT_BYTES / COPY / 1000


def _codes_us(layer: Layer, spread: Spread, wire: Wire) -> float:
    """Reading bf16 and writing codes for T tokens, reading codes and writing bf16 for those that arrive; x and dy."""
    if wire.payload == "bf16":
        return 0.0
    each = row_bytes(layer.features, wire.payload) + 2 * layer.features
    return 2 * each * layer.tokens * (1 + reached(layer, spread.ranks)) / COPY / 1000
