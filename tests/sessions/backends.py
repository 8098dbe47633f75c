"""Our own backends, by the names that the conformance suite knows, and where each of them runs."""

from __future__ import annotations

BACKENDS = {
    "torch-reference": "octavo-torch",
    "jax-reference": "octavo-jax",
    "torch-native": "octavo-torch-native",
    "torch-cudagraph": "octavo-torch-cudagraph",
    "jax-native": "octavo-jax-native",
    "torch-triton": "octavo-torch-triton",
    "torch-triton-interpreter": "octavo-torch-triton",
    "jax-triton": "octavo-jax-triton",
    "jax-triton-interpreter": "octavo-jax-triton",
}
ON_CUDA = ["torch-cudagraph", "torch-triton", "jax-triton"]  # backends that serve nothing else
INTERPRETED = ["torch-triton-interpreter", "jax-triton-interpreter"]
