"""The backend acme-jax: FP8 grouped GEMMs in JAX."""

__version__ = "0.1.0"
