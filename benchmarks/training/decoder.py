"""A decoder whose MLPs are `octavo_torch.MoE`s, and its training step, which is one CUDA graph on a GPU.

    tokens -> embedding -> [ norm -> causal attention, rotary -> + ; norm -> MoE -> + ] * layers -> norm -> logits

Everything is bf16 but the router's product, the loss, and what AdamW keeps: fp32 master weights and moments. A recipe
changes the experts' products alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

import octavo_torch as ot
from octavo import Recipe
from octavo_cli.train.config import TrainConfig

HEAD = 64
"""Channels of an attention head; a narrower model has one head."""
BETAS = (0.9, 0.95)


def turned(x: Tensor) -> Tensor:
    """Rotary position embedding (RoFormer, section 3.2.2) of [sequences, heads, context, channels]."""
    half = x.shape[-1] // 2
    rates = 10_000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(x.shape[2], device=x.device)[:, None] * rates
    cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    left, right = x.chunk(2, -1)
    return torch.cat((left * cosine - right * sine, right * cosine + left * sine), -1)


class Attention(nn.Module):
    """Causal attention over [sequences, context, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // HEAD)
        self.qkv = nn.Linear(width, 3 * width, bias=False, dtype=torch.bfloat16)
        self.projection = nn.Linear(width, width, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        sequences, context, width = x.shape
        q, k, v = self.qkv(x).view(sequences, context, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = turned(q), turned(k)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: Tensor = self.projection(mixed.transpose(1, 2).reshape(sequences, context, width))
        return y


class Layer(nn.Module):
    """Attention and experts, each after a norm and with a residual connection; returns the balance loss, too."""

    def __init__(self, config: TrainConfig, recipe: Recipe, seed: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, dtype=torch.bfloat16)
        self.attention = Attention(config.width)
        self.experts_norm = nn.RMSNorm(config.width, dtype=torch.bfloat16)
        self.experts = ot.MoE(
            config.experts, config.width, config.hidden, config.top_k, recipe=recipe, dtype=torch.bfloat16, seed=seed
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.attention_norm(x))
        tokens = self.experts_norm(x).flatten(0, 1)
        logits = functional.linear(tokens.float(), self.experts.router.float())
        choice = ot.choose_experts(logits, self.experts.k)
        share = choice.counts / choice.choices.numel()
        balance = len(share) * (share * torch.softmax(logits, -1).mean(0)).sum()
        return x + self.experts(tokens, choice).view_as(x), balance


class LanguageModel(nn.Module):
    """Logits fp32 [sequences, context, vocabulary] and the mean balance loss of tokens [sequences, context]."""

    def __init__(self, config: TrainConfig, recipe: Recipe, vocabulary: int, seed: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, config.width, dtype=torch.bfloat16)
        self.layers = nn.ModuleList(Layer(config, recipe, seed + number) for number in range(config.layers))
        self.norm = nn.RMSNorm(config.width, dtype=torch.bfloat16)
        self.logits = nn.Linear(config.width, vocabulary, bias=False, dtype=torch.bfloat16)

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Normal values that depend on the seed, the device and the sizes alone, so that recipes start alike."""
        generator = torch.Generator(self.logits.weight.device).manual_seed(seed)
        for name, parameter in self.named_parameters():
            if "norm" not in name:
                std = 0.5 if name == "embedding.weight" else parameter.shape[-1] ** -0.5
                parameter.normal_(std=std, generator=generator)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(tokens)
        balances = []
        for layer in self.layers:
            x, balance = layer(x)
            balances.append(balance)
        return self.logits(self.norm(x)).float(), torch.stack(balances).mean()


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Nats per byte [sequences, context]."""
    return functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")


class Trainer:
    """A model and its optimizer; `loss` holds the cross entropy of the last step, `lr` the rate of the next one."""

    def __init__(self, config: TrainConfig, recipe: Recipe, vocabulary: int, seed: int, device: torch.device) -> None:
        self.config = config
        with device:
            self.model = LanguageModel(config, recipe, vocabulary, seed)
            self.lr, self.loss = torch.zeros(()), torch.zeros(())
        self.model.initialize(seed)
        self.optimizer = ot.AdamW(self.model.parameters(), lr=self.lr, betas=BETAS, capturable=True)
        self._step: Callable[[Tensor], object] | None = None

    def step(self, tokens: Tensor) -> None:
        """Trains on tokens [sequences, context + 1]."""
        if self._step is None:
            self._step = self._captured(tokens) if tokens.is_cuda else self._eager
        self._step(tokens)

    @torch.no_grad()
    def evaluate(self, tokens: Tensor) -> Tensor:
        """Mean cross entropy of each of the sequences, in the recipe's own forward."""
        self.model.eval()
        parts = tokens.split(self.config.batch)  # type: ignore[no-untyped-call]
        losses = [cross_entropy(self.model(part[:, :-1])[0], part[:, 1:]).mean(1) for part in parts]
        self.model.train()
        return torch.cat(losses)

    def _value(self, model: nn.Module, tokens: Tensor) -> Tensor:
        logits, balance = model(tokens[:, :-1])
        loss = cross_entropy(logits, tokens[:, 1:]).mean()
        self.loss.copy_(loss.detach())
        value: Tensor = loss + self.config.balance * balance
        return value

    def _eager(self, tokens: Tensor) -> None:
        self.model.zero_grad(set_to_none=True)
        self._value(self.model, tokens).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        ot.update_scales(self.model)

    def _captured(self, tokens: Tensor) -> Callable[[Tensor], object]:
        from octavo_torch_cudagraph import graphed_step

        return graphed_step(self.model, self._value, tokens, optimizer=self.optimizer)
