"""Octavo's portable backend for PyTorch: quantizers and grouped GEMMs in Triton, for NVIDIA GPUs from sm_80 on.

Importing this package imports neither torch nor Triton: a registry that reads cards
(`octavo_torch_triton.plugin`) pays nothing for it.
"""

__version__ = "0.2.0"
