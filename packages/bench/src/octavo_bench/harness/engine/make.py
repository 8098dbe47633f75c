"""The engine of a framework by name, imported when it is asked for."""

from __future__ import annotations

from octavo_bench.harness.engine.protocol import Engine


def make_engine(framework: str, device: str) -> Engine:
    """The engine of a framework that is installed."""
    if framework == "jax":
        from octavo_bench.harness.engine.jax import JaxEngine

        return JaxEngine(device)
    from octavo_bench.harness.engine.torch import TorchEngine

    return TorchEngine(device)
