"""The model: shapes, initial parameters and schedule, the same numbers for both frameworks.

    tokens -> embedding + position -> [ norm -> causal mixing -> + ; norm -> experts -> + ] * layers -> norm -> logits

Norms are RMS norms (Zhang and Sennrich 2019). Mixing is causal attention in parallel with a depthwise convolution over
the last four positions (after Poli et al. 2023, section 3.1), which learns short contexts long before attention. The
experts are dropless: each token goes to its `top_k` experts, whose probabilities are renormalised to one, through fc1
[experts, 2 * hidden, width], SwiGLU (Shazeer 2020) and fc2 [experts, width, hidden]. Those two grouped layers take
bf16 rows and bf16 weights and are what a recipe changes; everything else is float32. The load-balancing loss is that
of the Switch Transformer (Fedus et al. 2021, equations 4 to 6) with each of the `top_k` choices counted: experts * sum
over e of (share of choices) * (mean probability).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from octavo_cli.train.config import TrainConfig
from octavo_cli.train.data import Tokens

Array = NDArray[np.float32]

NORM_EPSILON = 1e-6
TAPS = 4
"""Positions that the convolution sees: this one and the three before it."""
ADAM = (0.9, 0.98, 1e-9)
"""beta1, beta2, epsilon (Kingma and Ba 2015; the values of Vaswani et al. 2017)."""

FC2_SEED = 1 << 63
"""What `octavo_jax.grouped_mlp` tells its second layer's seed from the first one's by."""


Health = dict[str, dict[str, dict[str, float]]]
"""Layer -> operand -> what octavo.health.numbers_of says."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """One optimizer step: cross entropy in nats per byte, the load-balancing loss, rows per expert in each layer.

    gradient_norm   Euclidean norm of the gradients of all parameters
    health          where the step was observed: numbers_of each grouped layer's operands, by "layer0.fc1" and "x", "w"
                    or "dy"; empty else
    """

    loss: float
    balance: float
    load: NDArray[np.int64]
    gradient_norm: float
    health: Health = field(default_factory=dict)


class Model(Protocol):
    """What the loop drives; one object a (recipe, seed)."""

    def step(self, tokens: Tokens, step: int, *, observe: bool = False) -> StepResult:
        """One Adam step on [batch, context + 1] tokens; `step` counts from 0.

        observe   count what quantization does to the grouped layers' operands, where the framework can in passing
        """

    def evaluate(self, tokens: Tokens) -> NDArray[np.float64]:
        """[sequences] mean cross entropy of each sequence, in the recipe's own forward."""

    def expert_weights(self) -> dict[str, Array]:
        """The grouped layers' weights [experts, out, in] by name."""


def learning_rate(config: TrainConfig, step: int) -> float:
    """Linear warm-up over a tenth of the steps, then a cosine down to a tenth of the peak."""
    warmup = max(1, config.steps // 10)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, config.steps - warmup)
    return config.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def expert_names(config: TrainConfig) -> list[str]:
    """Names of the grouped layers' weights among the parameters."""
    return [f"layer{layer}.{name}" for layer in range(config.layers) for name in ("fc1", "fc2")]


def initial_parameters(config: TrainConfig, vocabulary: int, seed: int) -> dict[str, Array]:
    """Float32 parameters by name, drawn by numpy from `seed`, so that every recipe and framework starts alike."""
    draw = np.random.Generator(np.random.Philox(key=[seed, 2**63]))
    width, hidden, experts = config.width, config.hidden, config.experts

    def normal(*shape: int, std: float) -> Array:
        return (draw.standard_normal(shape) * std).astype(np.float32)

    parameters = {
        "embedding": normal(vocabulary, width, std=0.5),
        "position": normal(config.context, width, std=0.1),
    }
    for layer in range(config.layers):
        parameters |= {
            f"layer{layer}.mixing_norm": np.ones(width, np.float32),
            f"layer{layer}.taps": normal(TAPS, width, std=TAPS**-0.5),
            f"layer{layer}.qkv": normal(3 * width, width, std=width**-0.5),
            f"layer{layer}.projection": normal(width, width, std=width**-0.5),
            f"layer{layer}.expert_norm": np.ones(width, np.float32),
            f"layer{layer}.router": normal(experts, width, std=width**-0.5),
            f"layer{layer}.fc1": normal(experts, 2 * hidden, width, std=width**-0.5),
            f"layer{layer}.fc2": normal(experts, width, hidden, std=hidden**-0.5),
        }
    parameters["final_norm"] = np.ones(width, np.float32)
    parameters["logits"] = normal(vocabulary, width, std=0.5 * width**-0.5)
    return parameters


def rounding_seed(seed: int, step: int, layer: int) -> int:
    """Seed of stochastic rounding in one layer's fc1 at one step, distinct for each; fc2 takes it XOR `FC2_SEED`."""
    state = np.random.SeedSequence([seed, step, layer]).generate_state(1, np.uint64)
    return int(state[0])
