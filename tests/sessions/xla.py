"""How XLA compiles what tests run, as environment variables; it imports nothing, so that tests may import it."""

from __future__ import annotations

from typing import Literal

Effort = Literal["as users have it", "in a hurry"]
"""How XLA compiles programs on a CPU. In a hurry, without its fusion emitters and with nothing optimized by LLVM, it
takes less than half of the time, but programs run slower."""

_FLAGS: dict[Effort, tuple[str, ...]] = {
    "as users have it": (),
    "in a hurry": (
        "--xla_cpu_use_fusion_emitters=false",
        "--xla_cpu_parallel_codegen_split_count=1",
        "--xla_llvm_disable_expensive_passes=true",
    ),
}


def xla_settings(effort: Effort, *flags: str) -> dict[str, str]:
    """Environment variables; `flags` come before its own in XLA_FLAGS."""
    settings = {"XLA_FLAGS": " ".join([*flags, *_FLAGS[effort]]).strip()}
    settings["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"  # a twentieth of the time to lower a program
    if effort == "in a hurry":
        settings["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    return settings
