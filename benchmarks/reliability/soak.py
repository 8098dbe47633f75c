"""A small MoE layer trained for ten thousand steps: flat memory, and runs that are killed resume to the same bits.

One process trains without a break and writes the digest of its state at some steps. Then another one is killed by a
signal twenty times, each time at a step that nobody chose, and goes on from the last file that it had saved. Both end
in the same bits. Delayed scaling and stochastic rounding are on, so that histories and seeds count, too.
"""

from __future__ import annotations

import hashlib
import os
import random
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import octavo
import octavo_torch

STEPS, KILLS, EVERY = 10_000, 20, 100
EXPERTS, FEATURES, HIDDEN, CHOICES, TOKENS = 4, 32, 64, 2, 48
RECIPES = {"delayed": "fp8-delayed", "stochastic": "nvfp4"}


class Trainer:
    """Two layers, one per recipe, their optimizer, and the number of the next step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        layers = {
            name: octavo_torch.MoE(EXPERTS, FEATURES, HIDDEN, CHOICES, recipe=octavo.recipe(recipe), seed=number)
            for number, (name, recipe) in enumerate(RECIPES.items())
        }
        self.model = torch.nn.ModuleDict(layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.step = 0

    def train(self) -> None:
        """One step, on tokens that its number makes."""
        x = torch.randn(TOKENS, FEATURES, generator=torch.Generator().manual_seed(self.step))
        y = x
        for layer in self.model.values():
            y = y + layer(y)
        (y - x.roll(1, 1)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        octavo_torch.update_scales(self.model)
        self.step += 1

    def digest(self) -> str:
        """Of parameters, buffers and the optimizer's state."""
        content = hashlib.sha256(str(self.step).encode())
        tensors = [*self.model.state_dict().values()]
        tensors += [value for state in self.optimizer.state.values() for value in state.values()]
        for value in tensors:
            content.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return content.hexdigest()

    def save(self, folder: Path) -> None:
        """Both files, then the name of the newest: a kill in between leaves the one before."""
        octavo_torch.save_checkpoint(self.model, folder / f"{self.step}.safetensors")
        torch.save({"optimizer": self.optimizer.state_dict(), "step": self.step}, folder / f"{self.step}.pt")
        draft = folder / "newest.part"
        draft.write_text(str(self.step))
        draft.replace(folder / "newest")
        for old in folder.glob("*.safetensors"):
            if int(old.stem) < self.step:
                old.unlink()
                old.with_suffix(".pt").unlink(missing_ok=True)

    def load(self, folder: Path) -> None:
        """The newest files; nothing where there are none."""
        if not (folder / "newest").exists():
            return
        step = (folder / "newest").read_text()
        octavo_torch.load_checkpoint(self.model, folder / f"{step}.safetensors")
        state = torch.load(folder / f"{step}.pt", weights_only=True)
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]


def _resident() -> float:
    """MB of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def resumed(folder: Path, steps: int) -> None:
    """The child: train from the newest file to `steps`, save now and then, print the step that is done."""
    trainer = Trainer()
    trainer.load(folder)
    print(trainer.step, flush=True)
    while trainer.step < steps:
        trainer.train()
        if trainer.step % EVERY == 0:
            trainer.save(folder)
        print(trainer.step, flush=True)
    print(trainer.digest(), flush=True)


def _child(folder: Path, steps: int) -> subprocess.Popen[str]:
    command = (sys.executable, str(Path(__file__)), str(folder), str(steps))
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _killed(folder: Path, steps: int, at: int) -> int:
    """Kill a child when it has done step `at`; the step that it had begun with."""
    child = _child(folder, steps)
    assert child.stdout is not None
    began = int(child.stdout.readline())
    for line in child.stdout:
        if int(line) >= at:
            break
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    return began


def measure(count: int | None) -> dict[str, Any]:
    """`count` steps (None: 10 000), and as many again that are broken off twenty times."""
    steps, seed, start = count or STEPS, secrets.randbits(31), time.monotonic()
    trainer, memory = Trainer(), []
    for step in range(steps):
        trainer.train()
        if step + 1 in (steps // 10, steps):
            memory.append(round(_resident(), 1))
    wanted = trainer.digest()
    points = sorted(random.Random(seed).sample(range(1, steps), KILLS))
    with tempfile.TemporaryDirectory() as name:
        began = [_killed(Path(name), steps, at) for at in points]
        last = _child(Path(name), steps)
        assert last.stdout is not None
        found = last.stdout.read().split()[-1]
        last.wait()
    return {
        "seed": seed,
        "recipes": list(RECIPES.values()),
        "steps": steps,
        "resident_mb": dict(zip(("after_a_tenth", "at_the_end"), memory, strict=True)),
        "killed_at": points,
        "went_on_from": began,
        "equal_bits": found == wanted,
        "seconds": round(time.monotonic() - start),
        "faults": int(found != wanted) + int(memory[1] > 1.02 * memory[0]),
    }


if __name__ == "__main__":
    resumed(Path(sys.argv[1]), int(sys.argv[2]))
