"""The ranks that share a layer's experts: their collectives, and what is said where one fails."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from octavo_torch.arrays.checks import brief
from octavo_torch.compiler.status import ExchangeError

GRACE_SECONDS = 5.0
"""How long a rank whose exchange has failed waits for the others to say that theirs has, too."""

ExpertRanks = dist.ProcessGroup | DeviceMesh
"""What `ep=` takes."""


class ExpertGroup:
    """The ranks that share the experts: expert e of E is number e % G of rank e // G.

    ranks, rank   how many there are, and which one this is

    Copies of it share the process group.
    """

    def __init__(self, group: dist.ProcessGroup, *, borrowed: bool = False) -> None:
        """borrowed: it does not keep the group alive, because it lives in what the group keeps alive."""
        self._group: Callable[[], dist.ProcessGroup | None] = weakref.ref(group) if borrowed else lambda: group
        self.ranks, self.rank = group.size(), group.rank()

    @property
    def group(self) -> dist.ProcessGroup:
        """torch's own."""
        group = self._group()
        assert group is not None  # whoever sends has it
        return group

    def shared_with(self, other: dist.ProcessGroup) -> list[int]:
        """The ranks, by their numbers among all, that are in `other`, too."""
        return sorted({*dist.get_process_group_ranks(self.group)} & {*dist.get_process_group_ranks(other)})

    def named(self, *ranks: int) -> str:
        """Ranks of the group for a message, with their numbers among all ranks where these are others."""
        try:
            of_all = dist.get_process_group_ranks(self.group)
        except (KeyError, ValueError):  # of a group that its owner has destroyed
            return numbers(ranks)
        others = [of_all[rank] for rank in ranks]
        return numbers(ranks) + ("" if others == [*ranks] else f" ({', '.join(map(str, others))} of all)")

    def __deepcopy__(self, memo: object) -> ExpertGroup:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a MoE with ep= has a process group, which no file or other process can hold; save its state_dict, or by "
            "octavo_torch.save_distributed, and create the module on each rank"
        )

    def all_to_all(
        self, what: str, rows: Tensor, received: Sequence[int] | None = None, sent: Sequence[int] | None = None
    ) -> Tensor:
        """The rows [n, w] of all ranks that are for this one, in the order of the ranks.

        what             for an error's message
        received, sent   rows from and to each rank; None: equal shares

        Raises ExchangeError where it fails, which is at the latest when the group's timeout and GRACE_SECONDS are over.
        """
        rows = rows.contiguous()
        # bytes, because not every backend carries 8-bit floats
        flat = rows.view(torch.uint8)
        out = flat.new_empty((flat.shape[0] if received is None else sum(received), flat.shape[1]))
        of_out, of_flat = (None if shares is None else list(shares) for shares in (received, sent))
        with self.failures(what):
            dist.all_to_all_single(out, flat, of_out, of_flat, self.group)
        return out.view(rows.dtype)

    def gather(self, what: str, value: str) -> list[str]:
        """The texts of all ranks, in their order. It waits for them, on a GPU, too."""
        values = [""] * self.ranks
        with self.failures(what):
            dist.all_gather_object(values, value, group=self.group)
        return values

    def timeout(self, device: torch.device) -> timedelta:
        """How long a collective of tensors on `device` waits for a rank."""
        timeout: timedelta = self.group._get_backend(device).options._timeout
        return timeout

    @contextmanager
    def failures(self, what: str) -> Iterator[None]:
        """Raises ExchangeError where a collective inside the block fails; `what` it was of."""
        started = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            self._fail(what, time.monotonic() - started, error)

    def _fail(self, what: str, seconds: float, error: RuntimeError) -> NoReturn:
        """ExchangeError with the ranks that do not say that they have failed, too."""
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        missing = self._missing()
        if missing is None:
            cause = "the group's store does not answer either, so the rank that serves it may have ended"
        elif missing:
            cause = (
                f"no answer from {self.named(*missing)}: ended, or busy with something other than this layer (in a "
                "static exchange also: called with other arguments)"
            )
        else:
            cause = "every rank says so: the network is at fault, or collectives were called in another order somewhere"
        raise ExchangeError(
            f"{self.named(self.rank)} of {self.ranks}: the exchange of {what} failed after {seconds:.1f} s; {cause}. "
            f"The process group cannot be used any more; restart its ranks. {type(error).__name__}: {first_line}"
        ) from error

    def _missing(self) -> list[int] | None:
        """The ranks that have not failed likewise within GRACE_SECONDS; None where nobody can tell."""
        try:
            store = self.group.get_group_store()
            store.set(_key(self.rank), "1")
            missing = [rank for rank in range(self.ranks) if rank != self.rank]
            deadline = time.monotonic() + GRACE_SECONDS
            while missing and time.monotonic() < deadline:
                missing = [rank for rank in missing if not store.check([_key(rank)])]
                time.sleep(0.02)
        except RuntimeError:
            return None
        return missing


def expert_group(ep: object) -> ExpertGroup | None:
    """The group of `ep=`; None for None. ValueError for what is neither a process group nor one axis of a mesh."""
    if ep is None:
        return None
    if isinstance(ep, DeviceMesh):
        if ep.ndim != 1:
            axes = ", ".join(map(repr, ep.mesh_dim_names or ())) or "without names"
            raise ValueError(
                f'ep is a DeviceMesh with {ep.ndim} axes ({axes}); give the one of the experts, mesh["ep"]'
            )
        if ep.get_coordinate() is None:
            raise ValueError(f"ep is {ep} without this rank, {dist.get_rank()}; create the layer on its ranks alone")
        return ExpertGroup(ep.get_group())
    if isinstance(ep, int) and ep == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"ep is what new_group returns on ranks outside of the group, such as this one, {dist.get_rank()}; create "
            "the layer on the ranks of the group alone"
        )
    if not isinstance(ep, dist.ProcessGroup):
        raise ValueError(f"ep is {brief(ep)}; give a torch.distributed.ProcessGroup or one axis of a DeviceMesh")
    return ExpertGroup(ep)


def numbers(ranks: Sequence[int]) -> str:
    """`rank 2`, or `ranks 1, 3`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _key(rank: int) -> str:
    return f"octavo_torch/exchange_failed/{rank}"
