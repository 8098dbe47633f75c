"""Eight virtual CPU devices, for the tests that shard."""

from __future__ import annotations

import os

# JAX reads it once, when its first device is asked for.
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
