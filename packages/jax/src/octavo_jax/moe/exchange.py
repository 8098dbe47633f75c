"""Every token to every device that shares the experts, and the experts' sums back: dense, static, nothing is dropped.

For T tokens per device this sends the least that suffices for every routing: each token once to each other device, not
once per choice. `octavo_jax.moe.ragged_exchange` sends what the routing asks for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from octavo import Recipe
from octavo.payload import payload_spec
from octavo.quantizer import Operand
from octavo_jax.arrays.recipes import RecipeLike, as_recipe
from octavo_jax.dispatch.backends import BackendNames, hashable
from octavo_jax.moe.payload import move_with_payload

Way = Literal["gather", "ragged"]
WAYS: tuple[Way, ...] = ("gather", "ragged")


@dataclass(frozen=True)
class Exchange:
    """How tokens reach the experts of other devices, and come back.

    way       "gather": every token goes to every device of the expert axis, and each device returns one partial sum per
              token; static, on every platform. "ragged": each choice goes where its expert is, by
              `jax.lax.ragged_all_to_all`, which GPUs have and XLA:CPU lacks. None: "ragged" on GPUs where a token has
              fewer choices than the axis has devices, because it then moves less; else "gather"
    payload   RowScaling, BlockScaling or MXFP8, or the name of one: tokens on their way to the experts, and the
              gradients on theirs, travel as its codes and scales and are dequantized on arrival. None: as they are.
              Sums travel as they are
    rows      R, rows of each device's experts. None: as many as any routing can ask of it, devices * T * min(k, local
              experts), so nothing is ever dropped. Fewer save memory and time; choices past them are left out, their
              weight with them, and counted in `RouterStats.dropped`
    """

    way: Way | None = None
    payload: RecipeLike = None
    rows: int | None = None

    def __post_init__(self) -> None:
        if self.way not in (None, *WAYS):
            raise ValueError(f"way is {self.way!r}; it is 'gather', 'ragged' or None")
        rows: object = self.rows
        if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int | np.integer) or rows < 1):
            raise ValueError(f"rows is {rows!r}; give one or more, or None for as many as any routing can ask for")
        payload = as_recipe(self.payload)
        object.__setattr__(self, "payload", payload)
        if payload is not None:
            payload_spec(payload, "x")
            payload_spec(payload, "dy")


DEFAULT_EXCHANGE = Exchange()


@dataclass(frozen=True)
class TokenExchange:
    """What collectives of one exchange are compiled for: mesh axes, payload, backend of its quantizers."""

    axes: tuple[str, ...]
    payload: Recipe | None
    backend: str | tuple[str, ...] | None

    @classmethod
    def of(cls, axes: tuple[str, ...], payload: Recipe | None, backend: BackendNames) -> TokenExchange:
        """With a backend or backends as a caller gives them."""
        return cls(axes, payload, hashable(backend))


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def all_gather_tokens(x: Array, token_exchange: TokenExchange) -> Array:
    """x [T, K] of each device to [devices * T, K] of all, in the axes' order; its gradient is reduced and scattered."""
    return _all_gather(x, token_exchange, "x")


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def reduce_scatter_sums(parts: Array, token_exchange: TokenExchange) -> Array:
    """Partial sums [devices * T, N] to [T, N]: each device's own tokens, summed in float32 and rounded once.

    The order of the sum is the devices', so the bits do not depend on the network.
    """
    return _reduce_scatter(parts, token_exchange)


def _all_gather(x: Array, token_exchange: TokenExchange, operand: Operand) -> Array:
    end = jnp.full((1,), len(x), jnp.int32)
    return move_with_payload(
        x,
        end,
        partial(lax.all_gather, axis_name=token_exchange.axes, tiled=True),
        token_exchange.payload,
        operand,
        token_exchange.backend,
    )


def _reduce_scatter(parts: Array, token_exchange: TokenExchange) -> Array:
    devices = lax.axis_size(token_exchange.axes)
    by_device = parts.reshape(devices, -1, *parts.shape[1:])
    received = lax.all_to_all(by_device, token_exchange.axes, 0, 0)  # type: ignore[no-untyped-call]
    total: Array = jnp.sum(received.astype(jnp.float32), axis=0).astype(parts.dtype)
    return total


def _all_gather_fwd(x: Array, token_exchange: TokenExchange) -> tuple[Array, None]:
    return _all_gather(x, token_exchange, "x"), None


def _all_gather_bwd(token_exchange: TokenExchange, _: None, dx: Array) -> tuple[Array]:
    return (_reduce_scatter(dx, token_exchange),)


all_gather_tokens.defvjp(_all_gather_fwd, _all_gather_bwd)


def _reduce_scatter_fwd(parts: Array, token_exchange: TokenExchange) -> tuple[Array, None]:
    return _reduce_scatter(parts, token_exchange), None


def _reduce_scatter_bwd(token_exchange: TokenExchange, _: None, dy: Array) -> tuple[Array]:
    return (_all_gather(dy, token_exchange, "dy"),)


reduce_scatter_sums.defvjp(_reduce_scatter_fwd, _reduce_scatter_bwd)
