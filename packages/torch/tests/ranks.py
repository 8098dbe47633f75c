"""Four processes that are there for all tests with several ranks: torch is imported once, and each test's work sent.

A test calls `ranks(function, ...)`; each process runs `function(...)` as rank r of a gloo group, and what it returned
comes back in the order of the ranks. The function stands at the top of a module. A call that takes more than
WATCHDOG_SECONDS fails and ends the processes: a rank that leaves out a collective is a failure, not a hang.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

WORLD = 4
WATCHDOG_SECONDS = 120.0  # of a call, which takes seconds, on a machine that has other work
START_SECONDS = 300.0  # importing torch, on a machine that has other work

IMPORTED_ONCE = [
    "octavo_numerics",
    "octavo_torch.checkpoint.distributed",
    "octavo_torch.distributed.parallel",
    "octavo_torch.mlp.sequential",
    "octavo_torch.moe.moe",
    "octavo_torch.reference.backend",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torchtitan.models.gpt_oss.moe",
    "torchtitan.distributed.fsdp",
    "megatron.core.transformer.moe.moe_layer",
]
"""What ranks are forked with, where it is installed. Each would import it within its first call, whose seconds are the
watchdog's."""

device = "cpu"
"""In a rank: where its tensors are."""


def _serve(rank: int, world: int, backend: str, store: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    global device
    torch.set_num_threads(1)
    if "nccl" in backend:
        torch.cuda.set_device(rank)
        device = f"cuda:{rank}"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
    pipe.send((True, None))
    while (task := pipe.recv()) is not None:
        function, arguments = task
        try:
            pipe.send((True, function(*arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()


class Ranks:
    """The processes, started by the first call: ranks of a CPU's gloo group, or of an NCCL group with a GPU each."""

    def __init__(self, world: int = WORLD, backend: str = "gloo") -> None:
        """backend: torch.distributed's; with "nccl" in it each rank has a GPU."""
        self.world, self.backend = world, backend
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload(IMPORTED_ONCE)
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What each rank returned; the first rank's failure is raised as an AssertionError with its traceback."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, arguments))
        return self._answers(function.__name__, WATCHDOG_SECONDS)

    def survivors(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Likewise, with None for a rank whose process has ended; the processes are ended afterwards."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, arguments))
        answers = self._answers(function.__name__, WATCHDOG_SECONDS, may_end=True)
        self.stop()
        return answers

    def _answers(self, name: str, seconds: float, may_end: bool = False) -> list[Any]:
        """Of all ranks, as they come: where one fails the others may wait for it in a collective."""
        deadline = time.monotonic() + seconds
        answers: dict[int, Any] = {}
        while len(answers) < len(self._pipes):
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers}
            ready = wait([*waiting], max(0.0, deadline - time.monotonic()))
            if not ready:
                self.stop()
                raise AssertionError(f"ranks {[*waiting.values()]} did not answer within {seconds:g} s: {name}")
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                try:
                    worked, value = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    if not may_end:
                        raise
                    worked, value = True, None
                if not worked:
                    self.stop()
                    raise AssertionError(f"rank {rank}:\n{value}")
                answers[rank] = value
        return [answers[rank] for rank in sorted(answers)]

    def _start(self) -> None:
        folder = tempfile.mkdtemp()
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        for rank in range(self.world):
            ours, theirs = self._context.Pipe()
            arguments = rank, self.world, self.backend, str(Path(folder, "store")), theirs
            process = self._context.Process(target=_serve, args=arguments, daemon=True, name=f"rank {rank}")
            process.start()
            self._processes.append(process)
            self._pipes.append(ours)
        self._answers("start", START_SECONDS)

    def stop(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.terminate()
            process.join()
        self._processes, self._pipes = [], []


def made() -> Iterator[Ranks]:
    """The value of a fixture of the session's."""
    ranks = Ranks()
    yield ranks
    ranks.stop()
