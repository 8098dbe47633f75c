"""observe: what quantization does to x, w and dy of each grouped layer while a model trains."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch
from torch import Tensor, nn

from octavo.health import FIELDS, numbers_of
from octavo_torch.arrays.checks import brief
from octavo_torch.mlp.experts import Experts
from octavo_torch.quantizers.stats import TensorStats, check_rows
from octavo_torch.scaling.delayed_state import OPERANDS
from octavo_torch.scaling.probe import Probe
from octavo_torch.scaling.recipe_module import RecipeModule


@dataclass(frozen=True, slots=True, eq=False)
class Observation:
    """What one observed step has counted, in tensors on the layers' devices until `as_dict` reads them.

    step    number of the step, from 0
    totals  float64 [3, 8, G] by layer, operands in the order x, w, dy and counts in that of TensorStats' fields. The
            layers of a GroupedMLP or a MoE are called "<name>.fc1" and "<name>.fc2"
    """

    step: int
    totals: dict[str, Tensor]

    def tensors(self) -> dict[str, dict[str, TensorStats]]:
        """Statistics by layer and operand, on the layers' devices.

        An operand that no call has quantized has 0 elements here; `as_dict`, which reads the numbers, leaves it out.
        """
        return {
            name: {operand: TensorStats(*totals[index].unbind()) for index, operand in enumerate(OPERANDS)}
            for name, totals in self.totals.items()
        }

    def as_dict(self, prefix: str = "octavo/", *, experts: bool = False) -> dict[str, float]:
        """Flat numbers for W&B or TensorBoard, read in one transfer from each device.

        experts   also of each expert, as "<layer>/<operand>/expert<g>/<what>"

        Keys are "<prefix><layer>/<operand>/<what>": amax, non_finite (a number of elements), and where the operand is
        quantized saturated, underflow (shares of the elements looked at) and sqnr_db. An SQNR that does not exist,
        without a signal or without noise, is left out, and so is a number of inexact elements that is 0: with
        MXFP4Weights, those whose E4M3 codes have another value than MXFP4's.
        """
        numbers: dict[str, float] = {}
        for (name, _), host in zip(self.totals.items(), self._on_host(), strict=True):
            for operand, counted in zip(OPERANDS, host, strict=True):
                start = f"{prefix}{name}/{operand}/"
                numbers |= _numbers(start, TensorStats(*counted.unbind()).total())
                for expert in range(counted.shape[1] if experts else 0):
                    numbers |= _numbers(f"{start}expert{expert}/", TensorStats(*counted[:, expert : expert + 1]))
        return numbers

    def _on_host(self) -> list[Tensor]:
        parts = list(self.totals.values())
        host: list[Tensor] = [torch.empty(0)] * len(parts)
        for device in dict.fromkeys(part.device for part in parts):
            places = [place for place, part in enumerate(parts) if part.device == device]
            flat = torch.cat([parts[place].reshape(-1) for place in places]).cpu()
            pieces = torch.split(flat, [parts[place].numel() for place in places])
            for place, piece in zip(places, pieces, strict=True):
                host[place] = piece.view_as(parts[place])
        return host


def _numbers(start: str, stats: TensorStats) -> dict[str, float]:
    counts = [float(getattr(stats, name)) for name in FIELDS]
    return {start + name: value for name, value in numbers_of(counts).items()}


class Observer:
    """Counts at some steps of a training loop; made by `observe`, and a context manager that detaches itself.

    `observing` says whether the current step is counted.
    """

    def __init__(self, model: nn.Module, every: int, rows: int) -> None:
        self.every, self.rows = every, rows
        self._layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, RecipeModule)}
        if not self._layers:
            raise ValueError("model has no GroupedLinear, Linear, GroupedMLP or MoE to observe; give one that has")
        self._probes = {name: self._new_probes(layer) for name, layer in self._layers.items()}
        self._step = 0
        self.observing = False
        self._set(observing=True)

    def _new_probes(self, layer: RecipeModule) -> tuple[Probe, ...]:
        parameter = next(layer.parameters())
        if parameter.is_meta:
            raise ValueError("model is on the meta device and has no values to observe; call to_empty first")
        groups = int(layer.num_groups)
        count = 2 if isinstance(layer, Experts) else 1
        return tuple(Probe.create(layer.recipe, groups, self.rows, parameter.device) for _ in range(count))

    def _set(self, *, observing: bool) -> None:
        self.observing = observing
        for name, layer in self._layers.items():
            if observing:
                for probe in self._probes[name]:
                    probe.begin(layer.recipe)  # `convert` may have given the layer another recipe
                layer.probes = self._probes[name]
            elif layer.probes is self._probes[name]:
                del layer.probes

    def step(self) -> Observation | None:
        """End a step: returns what it has counted if it was observed, else None. No value is read on the host.

        Call it once after each optimizer step, outside of captured graphs.
        """
        seen = None
        if self.observing:
            totals = {}
            for name, probes in self._probes.items():
                parts = ("",) if len(probes) == 1 else (".fc1", ".fc2")
                for part, probe in zip(parts, probes, strict=True):
                    totals[(name + part).removeprefix(".") or "model"] = probe.totals.clone()
                    probe.totals.zero_()
            seen = Observation(self._step, totals)
        self._step += 1
        wanted = self._step % self.every == 0
        if wanted is not self.observing:
            self._set(observing=wanted)
        return seen

    def close(self) -> None:
        """Stop counting; the model is as it was."""
        self._set(observing=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def observe(model: nn.Module, *, every: int = 100, rows: int | None = 128) -> Observer:
    """Count what quantization does to x, w and dy of each layer with a recipe in `model`, at some steps.

    every   step 0 is observed, and each `every`-th after it; at the others the layers run as without an observer
    rows    how many rows of each expert are looked at: a multiple of 128, evenly spread, in 1024 of their columns;
            None: all rows and columns. An amax is always that of all elements

    ::

        with octavo_torch.observe(model) as observer:
            for batch in batches:
                train(batch)
                if seen := observer.step():
                    wandb.log(seen.as_dict(), step=seen.step)

    Counting changes no result. In an observed step nothing waits for the device: sums are added to tensors there, over
    microbatches, and `Observation.as_dict` reads them later. Activation checkpointing counts x and w of a layer twice,
    which changes no share and no SQNR. torch.compile makes one more graph for observed steps. A CUDA graph counts if it
    was captured in an observed step: capture one graph while `observer.observing` is true and one while it is not, and
    replay the one that fits the step. An operand that a caller has quantized before the layer's call has no values to
    count.

    After `octavo_torch.convert` an observed step counts anew, with the new recipe.

    Raises ValueError for arguments that do not fit and for a model without grouped layers.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is {brief(model)}; give a torch.nn.Module")
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"every is {brief(every)}; give the number of steps from one observed step to the next")
    check_rows(rows)
    return Observer(model, every, 0 if rows is None else rows)
