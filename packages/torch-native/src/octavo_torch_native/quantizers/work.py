"""Work: everything about a quantizing launch that its tensors do not say, as a value that an operator can name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from octavo import QuantizerSpec
from octavo.grouped_tensor import PLAIN
from octavo.quantizer import Operand
from octavo_native import GATED
from octavo_torch.plugin_api import quantizer_from, quantizer_text

Prologue = Literal["none", "activation", "activation_grad", "norm"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu2", "swiglu", "geglu", "geglu_tanh"]
Norm = Literal["rms", "layer"]


@dataclass(frozen=True)
class Work:
    """One kind of launch.

    quantizer    the spec; its orientation says which planes are made
    operand      part of the random bits' position
    layouts      of the rowwise and the columnwise plane
    prologue     what happens to the input first; activation, norm and epsilon are its own
    amax ...     further outputs: [G] amax, a bf16 dequantized copy, what was quantized, its column sums by group, the
                 gradient of the rows' probabilities
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

    @property
    def halves(self) -> bool:
        """True where what is quantized has half the input's columns."""
        return self.prologue == "activation" and self.activation in GATED


def text_of(work: Work) -> str:
    """The text by which operators name `work`."""
    return json.dumps({**vars(work), "quantizer": quantizer_text(work.quantizer)})


@lru_cache(maxsize=1024)
def work_from(text: str) -> Work:
    """What `text_of` wrote."""
    fields = json.loads(text)
    return Work(**{**fields, "quantizer": quantizer_from(fields["quantizer"]), "layouts": tuple(fields["layouts"])})
