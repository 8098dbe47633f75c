"""Which transport a group's exchanges have, and why."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from octavo_torch.moe.parallel.group import ExpertGroup, numbers
from octavo_torch.moe.parallel.options import RouteName
from octavo_torch.moe.parallel.transports.collective import CollectiveTransport
from octavo_torch.moe.parallel.transports.host_memory import HostMemory
from octavo_torch.moe.parallel.transports.memory import PeerMemory
from octavo_torch.moe.parallel.transports.peer import PeerTransport
from octavo_torch.moe.parallel.transports.transport import Transport


class Route(NamedTuple):
    """How rows travel, and why so."""

    name: RouteName
    reason: str


class Seat(NamedTuple):
    """Where a rank runs.

    host      the same for processes that share a host's memory and links
    visible   CUDA_VISIBLE_DEVICES, in whose order devices are numbered
    device    the number of its GPU; -1 on a CPU
    reaches   the numbers of the GPUs whose memory that one reads and writes
    """

    host: str
    visible: str
    device: int
    reaches: tuple[int, ...]


_seats: WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, list[Seat]]] = WeakKeyDictionary()
_transports: WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, PeerTransport]] = WeakKeyDictionary()


def route_of(group: ExpertGroup, asked: RouteName | None, static: bool, device: torch.device) -> Route:
    """The route of a group's tokens on `device`; all ranks ask at once, and have the same answer.

    asked    None: peer memory where it can be had
    static   whether buffers have a fixed size

    The first time of a group and a device the ranks tell each other where they run. Raises ValueError where what is
    asked for cannot be had.
    """
    route = route_of_any(asked, static, device)
    if route is not None:
        return route
    by_device = _seats.setdefault(group.group, {})
    if device not in by_device:
        texts = group.gather("the ranks' hosts and devices", json.dumps(_seat(device)))
        seats = [Seat(*json.loads(text)) for text in texts]
        by_device[device] = [seat._replace(reaches=tuple(seat.reaches)) for seat in seats]
    return _between(group, asked, by_device[device])


def known_route(group: ExpertGroup, asked: RouteName | None, static: bool, device: torch.device) -> Route | None:
    """`route_of` without asking a rank; None where it is up to them, and they have not told each other yet."""
    seats = _seats.get(group.group, {}).get(device)
    route = route_of_any(asked, static, device)
    return route if route is not None or seats is None else _between(group, asked, seats)


def _between(group: ExpertGroup, asked: RouteName | None, seats: Sequence[Seat]) -> Route:
    obstacle = obstacle_of(seats)
    if obstacle is None:
        return Route("peer", f"peer memory, because each of the {group.ranks} ranks reaches that of the others")
    if asked == "peer":
        raise ValueError(f'route is "peer", and {obstacle}; leave route out, or put the ranks on one host')
    return _collective(obstacle)


def route_of_any(asked: RouteName | None, static: bool, device: torch.device) -> Route | None:
    """The route whatever the ranks are; None where it is up to them."""
    if asked == "collective":
        return _collective('Exchange(route="collective") asks for it')
    if not static:
        return _collective("peer memory needs buffers of a fixed size: give Exchange(rows=)")
    if asked is None and device.type != "cuda":
        return _collective(f'tokens are on {device.type}; Exchange(route="peer") has the other protocol in host memory')
    return None


def _collective(why: str) -> Route:
    return Route("collective", f"torch.distributed's all_to_all_single, which every backend and device has; {why}")


def transport_for(group: ExpertGroup, route: RouteName, device: torch.device) -> Transport:
    """What carries a group's rows. It does not keep the group alive; peer memory is kept for the group's next calls."""
    own = ExpertGroup(group.group, borrowed=True)  # the transport is kept as long as the group is there
    if route == "collective":
        return CollectiveTransport(own)
    transports = _transports.setdefault(group.group, {})
    if device not in transports:
        transports[device] = PeerTransport(own, device, lambda size: _memory(own, size, device))
    return transports[device]


def _memory(group: ExpertGroup, size: int, device: torch.device) -> PeerMemory:
    if device.type != "cuda":
        return HostMemory(group, size)
    from octavo_torch.moe.parallel.transports.symmetric_memory import SymmetricMemory  # torch's own, of GPUs alone

    return SymmetricMemory(group, size, device)


def _seat(device: torch.device) -> Seat:
    boot = Path("/proc/sys/kernel/random/boot_id")
    host = f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"
    if device.type != "cuda":
        return Seat(host, "", -1, ())
    own = torch.cuda.current_device() if device.index is None else device.index
    others = (number for number in range(torch.cuda.device_count()) if number != own)
    reaches = tuple(number for number in others if torch.cuda.can_device_access_peer(own, number))
    return Seat(host, os.environ.get("CUDA_VISIBLE_DEVICES", ""), own, reaches)


def obstacle_of(seats: Sequence[Seat]) -> str | None:
    """Why ranks there cannot write into one another's memory; None where they can."""
    first = seats[0]
    apart = [rank for rank, seat in enumerate(seats) if seat.host != first.host]
    if apart:
        return f"the host of rank 0 is not that of {numbers(apart)}, and hosts share no memory"
    if first.device < 0:
        return None
    for rank, seat in enumerate(seats):
        if seat.visible != first.visible:
            return (
                f"rank {rank} sees other GPUs (CUDA_VISIBLE_DEVICES={seat.visible!r}) than rank 0 ({first.visible!r}), "
                "so neither can tell whether it reaches the other's memory; let all ranks see all GPUs"
            )
        out_of_reach = [other for other, there in enumerate(seats) if there.device not in (seat.device, *seat.reaches)]
        if out_of_reach:
            return f"the GPU of rank {rank} does not reach the memory of {numbers(out_of_reach)}"
    devices = [seat.device for seat in seats]
    shared = [rank for rank, device in enumerate(devices) if devices.count(device) > 1]
    return f"{numbers(shared)} share GPUs" if shared else None
