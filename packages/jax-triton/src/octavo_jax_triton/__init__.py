"""Octavo's portable backend for JAX: quantizers and grouped GEMMs in Triton, for NVIDIA GPUs from sm_80 on.

Importing this package imports neither JAX nor Triton: a registry that reads cards (`octavo_jax_triton.plugin`) pays
nothing for it.
"""

__version__ = "0.2.0"
