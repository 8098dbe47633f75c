"""The path of API level 4 to `octavo_registry.contract.kernels`."""

from octavo_registry.contract.backend import Backend as KernelModel
from octavo_registry.contract.kernels import KernelChoice

__all__ = ["KernelChoice", "KernelModel"]
