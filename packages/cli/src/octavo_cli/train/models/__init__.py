"""The same small model twice, in torch and in JAX, from one set of initial parameters; and their weights' bits."""
