"""A grouped layer and a MoE block on eight devices: python docs/examples/sharding_8_devices.py

Eight virtual CPU devices stand for a host's GPUs; on GPUs leave the first setting out.
"""

import jax

jax.config.update("jax_num_cpu_devices", 8)  # before JAX's first use

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import octavo  # noqa: E402
import octavo_jax  # noqa: E402
from octavo_jax import moe  # noqa: E402

# Four devices share the experts; two of each expert's copies are one, cut by FSDP.
mesh = jax.make_mesh((4, 2), ("ep", "fsdp"), (AxisType.Auto,) * 2)
axes = octavo_jax.MeshAxes(ep="ep", fsdp="fsdp")
recipe = octavo.MXFP8()
keys = jax.random.split(jax.random.key(0), 5)


def put(array: jax.Array, *spec: str | tuple[str, ...] | None) -> jax.Array:
    """The array on the mesh."""
    return jax.device_put(array, NamedSharding(mesh, P(*spec)))


# A grouped layer: rows of 4 expert blocks x 2 data blocks, 2 experts a block, so 8 experts in all.
rows, sizes = jax.random.normal(keys[0], (4, 2, 16, 64)), np.tile([9, 5], (4, 2, 1))
kernel = jax.random.normal(keys[1], (8, 64, 32)) / 8


def layer(kernel: jax.Array, rows: jax.Array, sharding: octavo_jax.MeshAxes | None) -> jax.Array:
    """Sum of squares of the layer's result."""
    y = octavo_jax.grouped_dense(rows, kernel, jnp.asarray(sizes), recipe=recipe, sharding=sharding)
    return jnp.sum(y**2)


one = jax.jit(jax.value_and_grad(layer), static_argnums=2)(kernel, rows, None)
with jax.set_mesh(mesh):
    many = jax.jit(jax.value_and_grad(layer), static_argnums=2)(
        put(kernel, "ep", "fsdp", None), put(rows, "ep", "fsdp", None, None), axes
    )
print("layer: loss", float(one[0]), "on one device,", float(many[0]), "on eight; gradient", many[1].sharding.spec)
# float32 sums in another order: 1e-5 is 168 roundings of 2^-24
np.testing.assert_allclose(many[1], one[1], atol=1e-5 * np.abs(one[1]).max())

# A MoE block: tokens of every device go to the two of 8 experts that the router picks, wherever those are.
tokens, router = jax.random.normal(keys[2], (64, 64)), jax.random.normal(keys[3], (64, 8)) / 8
wo = jax.random.normal(keys[4], (8, 16, 64)) / 4


def block(tokens: jax.Array, kernel: jax.Array, wo: jax.Array, sharding: octavo_jax.MeshAxes | None) -> jax.Array:
    """Sum of squares of the block's result, and the balance loss; tokens travel as MXFP8's codes."""
    exchange = moe.Exchange(payload=recipe)
    y, stats = moe.moe_mlp(tokens, router, kernel, wo, k=2, recipe=recipe, sharding=sharding, exchange=exchange)
    return jnp.sum(y**2) + stats.balance_loss


single = jax.jit(block, static_argnums=3)(tokens, kernel, wo, None)
with jax.set_mesh(mesh):
    spread = jax.jit(block, static_argnums=3)(
        put(tokens, ("fsdp", "ep")), put(kernel, "ep", "fsdp"), put(wo, "ep", None, "fsdp"), axes
    )
print("block: loss", float(single), "on one device,", float(spread), "on eight")
# a sum of 4 096 squares, whose order differs by 64 (their square root) roundings of 2^-24 and more than once
np.testing.assert_allclose(spread, single, rtol=1e-5)
