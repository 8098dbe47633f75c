"""Mixture of experts: a router, rows by expert and back, and the whole block.

`router` chooses the experts of each token, `routing` counts and orders its choices, `arrangement` has the row of each
choice, `permutation` moves rows there and back, `experts` runs a grouped MLP between the two, and `block` puts the
router before it. Over a mesh (`sharded_block`, and `local_block` on each device) the experts are spread
(`expert_parallel`), and tokens travel to them and back: `exchange` sends every token everywhere, `ragged_exchange` each
choice to its expert, `payload` codes in their place.
"""

from octavo_jax.moe.arrangement import Routing, arrange
from octavo_jax.moe.block import moe_mlp
from octavo_jax.moe.block_report import MoeReport, explain
from octavo_jax.moe.exchange import DEFAULT_EXCHANGE, Exchange
from octavo_jax.moe.experts import routed_mlp
from octavo_jax.moe.permutation import combine, permute, row_weights
from octavo_jax.moe.routing import RouterStats, route, router_stats

__all__ = [
    "DEFAULT_EXCHANGE",
    "Exchange",
    "MoeReport",
    "RouterStats",
    "Routing",
    "arrange",
    "combine",
    "explain",
    "moe_mlp",
    "permute",
    "route",
    "routed_mlp",
    "router_stats",
    "row_weights",
]
