"""Mixture of experts: a router, rows by expert and back, and the whole block.

`routing` which experts each token goes to, `arranging` where its rows stand, `permutation` rows by expert and back,
`experts` both around a grouped MLP, `block` the router before it. Over a mesh (`over_mesh`) experts are spread
(`spread`), and tokens travel to them and back: `exchange` densely, `ragged` choice by choice, `payload` as codes.
"""

from octavo_jax.moe.arranging import Routing, arrange
from octavo_jax.moe.block import moe_mlp
from octavo_jax.moe.exchange import DEFAULT_EXCHANGE, Exchange
from octavo_jax.moe.experts import routed_mlp
from octavo_jax.moe.permutation import combine, permute, row_weights
from octavo_jax.moe.routing import RouterStats, route, router_stats

__all__ = [
    "DEFAULT_EXCHANGE",
    "Exchange",
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
