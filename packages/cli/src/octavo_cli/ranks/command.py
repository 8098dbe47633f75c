"""What `octavo advise --ranks` prints."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from octavo_cli.errors import InputError
from octavo_cli.ranks.links import H200
from octavo_cli.ranks.plans import UNKNOWN, Cluster, Plan, fastest, plans
from octavo_cli.ranks.rates import RATES
from octavo_cli.ranks.traffic import Layer

Json = dict[str, Any]


def layer_of(shape: tuple[int, int, int, int], choices: int) -> Layer:
    """From G, K, F, M, where M counts the choices of one rank's tokens; InputError where they do not fit."""
    experts, features, hidden, rows = shape
    if not 1 <= choices <= experts:
        raise InputError(f"--choices is {choices} of {experts} experts; give 1 to {experts}")
    if rows % choices:
        raise InputError(f"--shape has M = {rows} rows for {choices} choices per token; give a multiple of {choices}")
    return Layer(experts, features, hidden, rows // choices, choices)


def cluster_of(ranks: int, per_host: int, layers: int, micro_batches: int, network: float) -> Cluster:
    """Of what the command line has; InputError for what cannot be."""
    counts = {"--ranks": ranks, "--per-host": per_host, "--layers": layers, "--micro-batches": micro_batches}
    for name, count in counts.items():
        if count < 1:
            raise InputError(f"{name} is {count}; give 1 or more")
    if not 0 < network < 1e6:
        raise InputError(f"--network is {network}; give GB/s of one rank's adapter, such as {H200.network:g}")
    links = replace(H200, network=network)
    return Cluster(ranks, per_host, layers, micro_batches=micro_batches, links=links)


def _why_nothing_fits(layer: Layer, cluster: Cluster) -> str:
    """Experts are spread evenly over a number of ranks that divides theirs, and the job's."""
    experts = layer.experts
    least = math.ceil(3 * experts * layer.features * layer.hidden * 16 * cluster.layers / cluster.memory / 1e9)
    most = math.gcd(experts, cluster.ranks)
    enough = next((ranks for ranks in range(least, experts + 1) if experts % ranks == 0), None)
    ways = [] if enough is None else [f"--ranks {enough} or a multiple of that"]
    ways += ["fewer --layers"] if cluster.layers > 1 else []
    ways += [] if ways else ["a smaller --shape"]
    return (
        f"{experts} experts need {least} ranks or more, with {cluster.memory:g} GB of each for its experts (--layers "
        f"{cluster.layers}), and --ranks {cluster.ranks} spreads them over {most} at most, the largest number that "
        f"divides both; give {', or '.join(ways)}"
    )


def advise_ranks(layer: Layer, cluster: Cluster, recipe: str, skew: float, as_json: bool) -> None:
    """Print the advice; InputError where nothing is known of a recipe, or nothing fits."""
    from octavo_registry.cli.output import print_json, print_line, print_table

    if recipe not in RATES:
        raise InputError(f"--recipes is {recipe!r}; with --ranks give one of {', '.join(RATES)}")
    if not 1 <= skew < math.inf:
        raise InputError(
            f"--skew is {skew}; give the rows of the busiest rank divided by the average, at least 1, such as 1.25"
        )
    candidates = [*plans(layer, cluster, recipe, skew)]
    best = fastest(candidates)
    if best is None:
        raise InputError(_why_nothing_fits(layer, cluster))
    chosen = {
        "recommended": best,
        "keeps_bits": fastest(candidates, keeps_bits=True),
        "not_built": fastest(candidates, built=False),
    }
    if as_json:
        print_json(_json(layer, cluster, recipe, skew, chosen))
        return
    rows = [
        *(("advised" if plan is best else "", plan) for plan in _by_size(candidates)),
        *(
            (note, chosen[name])
            for name, note in (("keeps_bits", "bits of one process"), ("not_built", "not built yet"))
        ),
    ]
    print_table(
        f"{layer.experts} experts, {layer.tokens} tokens per rank, {recipe}, {cluster.ranks} ranks of "
        f"{cluster.per_host} per host",
        ("ranks x experts", "route", "wire", "back", "compute", "exposed", "gradients", "sum", ""),
        [_cells(plan, note) for note, plan in rows if plan is not None],
    )
    print_line("compute, exposed: forward and backward of one layer and micro-batch, of the busiest rank, in ms.")
    print_line("gradients: the reduction over replicas, of each micro-batch. Nothing of this was run: it is a model.")
    for what in UNKNOWN:
        print_line(f"Not known: {what}.")
    print_line(f"Advice: {_sentence(best)}")


def _by_size(candidates: list[Plan]) -> list[Plan]:
    """The fastest of each number of ranks, of the routes that are there."""
    sizes = sorted({plan.spread.ranks for plan in candidates})
    found = [fastest([plan for plan in candidates if plan.spread.ranks == size]) for size in sizes]
    return [plan for plan in found if plan is not None]


def _cells(plan: Plan, note: str) -> tuple[str, ...]:
    times = (plan.step.compute, plan.step.exposed, plan.gradients, plan.total)
    alone = plan.spread.ranks == 1
    return (
        f"{plan.spread.ranks} x {plan.experts}",
        "-" if alone else plan.route,
        "-" if alone else plan.wire.payload,
        "-" if alone else plan.wire.returns,
        *(f"{time / 1000:.2f}" for time in times),
        note,
    )


def _sentence(plan: Plan) -> str:
    if plan.spread.ranks == 1:
        return "all experts on each rank; nothing is exchanged."
    share = plan.step.exposed / plan.step.total
    return (
        f"groups of {plan.spread.ranks} ranks with {plan.experts} experts each, by the {plan.route} route, tokens as "
        f'{plan.wire.payload}, returns="{plan.wire.returns}"; {share:.0%} of forward and backward is exposed.'
    )


def _json(layer: Layer, cluster: Cluster, recipe: str, skew: float, chosen: dict[str, Plan | None]) -> Json:
    return {
        "schema_version": 1,
        "ranks": cluster.ranks,
        "per_host": cluster.per_host,
        "layer": {
            "experts": layer.experts,
            "features": layer.features,
            "hidden": layer.hidden,
            "tokens": layer.tokens,
            "choices": layer.choices,
        },
        "recipe": recipe,
        "skew": skew,
        "network_gb_per_s": cluster.links.network,
        "time": "model",
        **{name: None if plan is None else _plan_json(plan) for name, plan in chosen.items()},
        "not_known": list(UNKNOWN),
    }


def _plan_json(plan: Plan) -> Json:
    step = plan.step
    return {
        "group": plan.spread.ranks,
        "experts_per_rank": plan.experts,
        "route": plan.route if plan.spread.ranks > 1 else None,
        "payload": None if plan.wire.payload == "bf16" else plan.wire.payload,
        "returns": plan.wire.returns,
        "memory_gb": round(plan.memory, 1),
        "bytes_within_host": round(step.within),
        "bytes_beyond_host": round(step.beyond),
        "compute_us": round(step.compute, 1),
        "exchange_us": round(step.exchange, 1),
        "exposed_us": round(step.exposed, 1),
        "exposed_share": round(step.exposed / step.total, 4),
        "gradients_us": round(plan.gradients, 1),
        "us": round(plan.total, 1),
    }
