"""Damaged recipes, sizes, calls and files: each is refused by an error that a user can read, or does no harm.

They run in child processes, so that a crash is a count and not the end. A child that dies, a refusal of another type
than those that are documented, and a damaged file that loads with other values are faults.
"""

from __future__ import annotations

import multiprocessing
import random
import secrets
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import octavo
import octavo_torch

REFUSALS = (ValueError, octavo.OctavoError)
BACKENDS = ("torch-reference", "torch-native")
_PART = 20_000  # inputs of one child
_SHARES = {"recipes": 0.55, "sizes": 0.25, "arguments": 0.15, "files": 0.05}


def _damaged(rng: random.Random, text: str) -> str:
    """`text` with some characters replaced, removed, doubled or cut off."""
    characters = list(text)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(characters)) if characters else 0
        what = rng.randrange(5)
        if what == 0 and characters:
            characters[at] = chr(rng.choice((0, 10, 34, 44, 58, 91, 123, 0x2028, 0xFFFD, rng.randrange(32, 127))))
        elif what == 1 and characters:
            del characters[at]
        elif what == 2:
            characters[at:at] = characters[at : at + rng.randint(1, 20)]
        elif what == 3:
            characters[at:at] = rng.choice(("1e999", "-0", "[[[[", "null", "1" * 400, "\\ud800", "NaN", '"kind":'))
        else:
            del characters[at:]
    return "".join(characters)


def _recipe(rng: random.Random) -> None:
    recipe = octavo.recipe(rng.choice(list(octavo.PRESETS)))
    if rng.random() < 0.5:
        octavo.Recipe.from_json(_damaged(rng, recipe.to_json()))
    else:
        octavo.Recipe.from_toml(_damaged(rng, recipe.to_toml()))


def _hostile(rng: random.Random) -> int:
    return rng.choice((-1, -(2**63), 2**31 - 1, 2**31, 2**62, 2**63 - 1, 2**64, 8, 9, 0, rng.randrange(-9, 20)))


def _sizes(rng: random.Random) -> None:
    sizes = [_hostile(rng) for _ in range(rng.randint(0, 5))]
    given: Any = rng.choice((sizes, tuple(sizes), [float(size) for size in sizes], [str(size) for size in sizes]))
    if rng.random() < 0.4 and all(-(2**63) <= size < 2**63 for size in sizes):
        given = rng.choice((np.array(sizes, np.int64), torch.tensor(sizes, dtype=torch.int64)))
    x = torch.ones(8, 16, dtype=torch.bfloat16)
    octavo_torch.quantize(x, octavo.MXFP8().quantizer("x"), given, backend=rng.choice(BACKENDS))


def _anything(rng: random.Random) -> Any:
    shape = [rng.choice((0, 1, 2, 3, 8, 16, 32)) for _ in range(rng.randint(0, 4))]
    dtype = rng.choice((torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64))
    tensor = torch.zeros(shape, dtype=dtype)
    return rng.choice(
        (tensor, tensor.to("meta"), tensor.numpy() if dtype is not torch.bfloat16 else None, None, -1, 2**70, "mxfp8",
         float("nan"), object(), [], {}, "", print, tensor.transpose(0, -1) if tensor.dim() else tensor)
    )  # fmt: skip


def _argument(rng: random.Random) -> None:
    given: dict[str, Any] = {
        "x": torch.ones(8, 16, requires_grad=True),
        "weight": torch.ones(2, 32, 16, requires_grad=True),
        "group_sizes": [3, 4],
        "recipe": octavo.recipe(rng.choice(("mxfp8", "nvfp4", "fp8-row", "bf16"))),
        "bias": None,
        "seed": 1,
        "group_offset": 0,
        "backend": rng.choice(BACKENDS),
    }
    given[rng.choice(list(given))] = _anything(rng)
    octavo_torch.grouped_linear(**given)


def _files(folder: Path) -> Callable[[random.Random], None]:
    """Loads a checkpoint of which some bytes are changed, or the end is gone."""
    layer = octavo_torch.GroupedLinear(2, 32, 32, recipe=octavo.MXFP8(), dtype=torch.bfloat16, seed=0)
    whole = folder / "whole.safetensors"
    octavo_torch.save_checkpoint(layer, whole, quantized=True)
    content = whole.read_bytes()

    def load(rng: random.Random) -> None:
        damaged = bytearray(content)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        if rng.random() < 0.3:
            del damaged[rng.randrange(len(damaged)) :]
        if bytes(damaged) == content:
            return
        file = folder / "damaged.safetensors"
        file.write_bytes(damaged)
        octavo_torch.load_checkpoint(
            octavo_torch.GroupedLinear(2, 32, 32, recipe=octavo.MXFP8(), dtype=torch.bfloat16, seed=0), file
        )
        raise AssertionError("a damaged checkpoint was loaded")

    return load


def _part(kind: str, seed: int, count: int, answers: Any) -> None:
    torch.set_num_threads(1)
    rng = random.Random(seed)
    told: Counter[str] = Counter()
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        kinds = {"recipes": _recipe, "sizes": _sizes, "arguments": _argument}
        call = kinds[kind] if kind in kinds else _files(Path(folder))
        for number in range(count):
            try:
                call(rng)
                told["harmless"] += 1
            except REFUSALS as error:
                told["refused"] += 1
                if "\n" in str(error).strip() and not isinstance(error, octavo.NoBackendError):
                    wrong.append(f"{kind}, seed {seed}, input {number}: a refusal of several lines")
            except Exception as error:
                wrong.append(f"{kind}, seed {seed}, input {number}: {type(error).__name__}: {error}"[:300])
    answers.put((dict(told), wrong))


def measure(count: int | None) -> dict[str, Any]:
    """What became of `count` inputs (None: 100 000)."""
    total, seed = count or 100_000, secrets.randbits(31)
    context = multiprocessing.get_context("spawn")
    by_kind: dict[str, dict[str, int]] = {}
    wrong: list[str] = []
    crashes: list[str] = []
    for kind, share in _SHARES.items():
        told: Counter[str] = Counter()
        left = round(total * share)
        while left:
            part = min(left, _PART)
            answers = context.SimpleQueue()
            child = context.Process(target=_part, args=(kind, seed, part, answers))
            child.start()
            child.join()
            if child.exitcode:
                crashes.append(f"{kind}, seed {seed}: exit status {child.exitcode}")
            else:
                outcome, more = answers.get()
                told.update(outcome)
                wrong += more
            left, seed = left - part, seed + 1
        by_kind[kind] = dict(told)
    return {
        "inputs": total,
        "crashes": len(crashes),
        "by_kind": by_kind,
        "undocumented": len(wrong),
        "examples": [*crashes, *wrong][:20],
        "faults": len(crashes) + len(wrong),
    }
