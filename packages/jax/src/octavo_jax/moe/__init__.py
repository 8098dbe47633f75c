"""Mixture of experts: a router, rows by expert and back, and the whole block.

`routing` which expert each token goes to, `permutation` rows by expert and back, `block` both around a grouped MLP.
"""

from octavo_jax.moe.block import moe_mlp, routed_mlp
from octavo_jax.moe.permutation import combine, permute, row_weights
from octavo_jax.moe.routing import RouterStats, Routing, arrange, route, router_stats

__all__ = [
    "RouterStats",
    "Routing",
    "arrange",
    "combine",
    "moe_mlp",
    "permute",
    "route",
    "routed_mlp",
    "router_stats",
    "row_weights",
]
