"""LaunchSpec: everything about a quantizing launch that its tensors do not say, as text in operators' schemas."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from octavo import QuantizerSpec
from octavo.grouped_tensor import PLAIN
from octavo.quantizer import Operand
from octavo_native import GATED
from octavo_native.support import Activation
from octavo_torch.plugin_api import quantizer_from, quantizer_text

Prologue = Literal["none", "activation", "activation_grad", "norm"]
Norm = Literal["rms", "layer"]


@dataclass(frozen=True)
class LaunchSpec:
    """One kind of launch.

    quantizer      how the planes are quantized; its orientation says which are written
    operand        part of the random bits' position
    layouts        of the rowwise and the columnwise plane
    prologue       what is computed first; activation, norm and epsilon belong to it
    planes         whether the planes are written: an activation and its gradient are made without them, too
    amax ...       whether the launch also writes the amax of each group, a bf16 dequantized copy, what was quantized,
                   its column sums by group, the gradient of the rows' probabilities, and beside an activation's
                   gradient the activation
    interleaved_*  columns or rows of matrices, of which two halves take turns, that stay together; 0: none take turns
    """

    quantizer: QuantizerSpec
    operand: Operand
    layouts: tuple[str, str] = (PLAIN, PLAIN)
    prologue: Prologue = "none"
    activation: Activation = "silu"
    norm: Norm = "rms"
    epsilon: float = 0.0
    amax: bool = False
    dequantized: bool = False
    activated: bool = False
    dbias: bool = False
    dprobs: bool = False
    forward: bool = False
    planes: bool = True
    interleaved_cols: int = 0
    interleaved_rows: int = 0

    @property
    def halves(self) -> bool:
        """True where what is quantized has half the input's columns."""
        return self.prologue == "activation" and self.activation in GATED


def spec_text(spec: LaunchSpec) -> str:
    """`spec` as JSON: operators' schemas take text."""
    return json.dumps({**vars(spec), "quantizer": quantizer_text(spec.quantizer)})


@lru_cache(maxsize=1024)
def spec_from(text: str) -> LaunchSpec:
    """The spec that `spec_text` wrote."""
    fields = json.loads(text)
    fields["quantizer"], fields["layouts"] = quantizer_from(fields["quantizer"]), tuple(fields["layouts"])
    return LaunchSpec(**fields)
