"""How fast bytes travel: within a host as two and four H200s measured it, between hosts as others have published it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Links:
    """Rates in GB/s, out of a rank and into it at once; fixed times in microseconds.

    peer            stores into another rank's memory, within a host
    collective      NCCL within a host
    network         one rank's adapter to other hosts
    barrier_us      of an exchange over peer memory
    collective_us   of one collective within a host
    network_us      of one collective that leaves the host
    """

    peer: float
    collective: float
    network: float
    barrier_us: float
    collective_us: float
    network_us: float


H200 = Links(peer=366.0, collective=283.0, network=44.0, barrier_us=5.3, collective_us=10.0, network_us=22.0)
"""Measured on two H200s of one host: pushes of 366 to 385 GB/s each way with both ways at once, of which the lower end
is taken; a barrier of 5.3 us; NCCL at 283 GB/s. collective_us is what that rate leaves of NCCL's all-to-all and
all-gathers over four H200s in benchmarks/results/ep-profile-h200-2026-11-22.json.

Not measured by us: network and network_us. They are solved from DeepEP's published figures at 64 ranks with one
400 Gb/s adapter per rank, and `published` holds them to all others.
"""

COPY = 4191.0
"""GB/s that quantizers read and write: copy_tb_per_s of benchmarks/results/quantize-h200-2026-11-30.json."""
