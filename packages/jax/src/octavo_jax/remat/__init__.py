"""Names of quantized planes for `jax.checkpoint`."""
