"""The machine that a benchmark ran on, and the versions of what took part."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
from typing import Any

_DISTRIBUTIONS = (
    *("octavo", "octavo-bench", "octavo-core", "octavo-registry", "octavo-numerics", "octavo-torch"),
    *("octavo-native", "octavo-torch-native", "octavo-torch-triton", "octavo-jax", "octavo-jax-native"),
    *("octavo-triton", "octavo-jax-triton"),
    *("torch", "triton", "jax", "jaxlib", "jax-triton", "numpy"),
    *("deep_gemm", "sgl-deep-gemm", "sonic-moe", "quack-kernels", "nvidia-cutlass-dsl"),
)


def versions() -> dict[str, str | None]:
    """Versions of what took part; None for what is not installed."""
    installed: dict[str, str | None] = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in _DISTRIBUTIONS:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed[name] = None
    return installed


def machine(device: str, framework: str = "torch") -> dict[str, Any]:
    """The processor, or the GPU with its driver, and how the native library was built; None: it is not installed."""
    facts: dict[str, Any] = {
        "system": platform.system(),
        "processor": platform.machine(),
        "cores": cores(),
        "native_build": _native_build(),
    }
    if device == "cuda" and framework == "jax":
        import jax

        first = jax.devices("gpu")[0]
        facts |= {"gpu": first.device_kind, "driver": _driver()}
    elif device == "cuda":
        import torch

        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "gpu": properties.name,
            "compute_capability": [properties.major, properties.minor],
            "sm_count": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
            "memory_bytes": properties.total_memory,
            "driver": _driver(),
            "torch_cuda": torch.version.cuda,
        }
    return facts


def _native_build() -> dict[str, Any] | None:
    if importlib.util.find_spec("octavo_native") is None:
        return None
    import octavo_native

    return {name: _plain(value) for name, value in octavo_native.build_info().items()}


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        report = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return report.split()[0] if report.split() else None


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
