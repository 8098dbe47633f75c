"""The devices of JAX as requests name them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jax import Array

from octavo import OctavoError


class DeviceKind(NamedTuple):
    """kind: "cpu", "cuda", "rocm" or the platform's name; arch: compute capability of "cuda", else None."""

    kind: str
    arch: tuple[int, int] | None


def device_of(x: Array) -> DeviceKind:
    """The kind of the device that x is on, or of the default device for a traced x and for one of numpy's."""
    return device_kind(device_holding(x))


def multiprocessors_of(x: Array) -> int:
    """How many multiprocessors the same device has; OctavoError if JAX does not tell."""
    device = device_holding(x)
    count = getattr(device, "core_count", None)
    if not isinstance(count, int):
        raise OctavoError(
            f"room leaves multiprocessors to others and JAX {jax.__version__} does not say how many {device} has: it "
            "has no core_count; leave room out on this device"
        )
    return count


def device_holding(x: Array) -> Any:
    """The device that x is on, the first of several; the default device for a traced x and for one of numpy's."""
    if isinstance(x, jax.core.Tracer) or not isinstance(x, jax.Array):
        default = jax.config.jax_default_device  # type: ignore[attr-defined]
        return jax.devices(default)[0] if isinstance(default, str) else default or jax.devices()[0]
    return next(iter(x.devices()))


def device_kind(device: Any) -> DeviceKind:
    """The kind of a JAX device: "cuda" for NVIDIA's GPUs, else its platform."""
    if device.platform != "gpu":
        return DeviceKind(device.platform, None)
    capability = str(getattr(device, "compute_capability", ""))
    if "rocm" in str(getattr(device.client, "platform_version", "")).lower() or "." not in capability:
        return DeviceKind("rocm", None)
    major, minor = capability.split(".")
    return DeviceKind("cuda", (int(major), int(minor)))
