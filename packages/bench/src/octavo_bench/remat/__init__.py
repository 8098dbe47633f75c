"""`octavo bench remat`: a block of layers in JAX under each policy of jax.checkpoint."""
