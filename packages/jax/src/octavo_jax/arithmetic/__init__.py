"""The definition of every recipe in jnp operations, checked bit for bit."""
