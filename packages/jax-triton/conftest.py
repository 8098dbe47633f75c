"""Triton interprets its kernels in these tests where there is no GPU; eight virtual devices, for tests that shard."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "tests"))

# JAX reads it once, when its first device is asked for.
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
if shutil.which("nvidia-smi") is None:
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when a kernel is defined
