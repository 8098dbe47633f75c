"""What `octavo doctor` says of this package (entry-point group `octavo.doctor`)."""

from __future__ import annotations

from octavo_native._native import build_info


def lines() -> list[str]:
    """Which kernels this build has, and how to get those that it has not."""
    info = build_info()
    if info["cuda"]:
        return [f"kernels for the CPU and for CUDA ({', '.join(info['archs'])}, nvcc {info['nvcc']})"]
    return [
        "kernels for the CPU alone: nvcc was not found when this build was made",
        "for CUDA kernels put nvcc 12.8 or newer on the PATH, and in a clone of Octavo run: "
        "pip install --force-reinstall --no-deps ./native",
    ]
