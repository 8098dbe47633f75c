"""Eight virtual CPU devices, for the tests that shard, and the tests' helper modules."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# JAX reads it once, when its first device is asked for.
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

# Helper modules by name: pytest's importlib mode puts no folder of tests on the path.
sys.path.insert(0, str(Path(__file__).resolve().parent / "tests"))
