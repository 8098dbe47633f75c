"""The demo's model in PyTorch; `model` says what it computes."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from octavo import DelayedScaling, Recipe
from octavo.health import FIELDS, WINDOW, numbers_of
from octavo.quantizer import Operand
from octavo_cli.train.config import HEAD_WIDTH, TrainConfig
from octavo_cli.train.data import Tokens
from octavo_cli.train.models.model import (
    ADAM,
    FC2_SEED,
    NORM_EPSILON,
    TAPS,
    Array,
    StepResult,
    expert_names,
    initial_parameters,
    learning_rate,
    rounding_seed,
)
from octavo_torch import DelayedState, TensorStats, grouped_linear, moe_mlp, tensor_stats

Form = Literal["keep_all", "standard", "lean", "recompute"]


class Mixing(nn.Module):
    """Causal multi-head attention in parallel with a short causal convolution, over [batch, context, width]."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self.heads = config.width // HEAD_WIDTH
        self.taps = nn.Parameter(torch.empty(TAPS, config.width))
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.projection = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, context, width = x.shape
        q, k, v = self.qkv(x).view(batch, context, 3, self.heads, HEAD_WIDTH).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        padded = functional.pad(x, (0, 0, TAPS - 1, 0)).unfold(1, TAPS, 1)
        near = torch.einsum("bcwt,tw->bcw", padded, self.taps)
        far: Tensor = self.projection(mixed.transpose(1, 2).reshape(batch, context, width))
        return near + far


class Watch:
    """Counts what quantization does to the operands of one layer's experts in one step."""

    def __init__(self) -> None:
        self.counted: dict[str, dict[str, TensorStats]] = {}

    def look(
        self,
        name: str,
        recipe: Recipe,
        state: DelayedState | None,
        operands: dict[Operand, tuple[Tensor, Tensor | None]],
        y: Tensor,
    ) -> None:
        """Count the operands of one grouped layer now, and y's gradient once there is one."""
        sizes = operands["x"][1]
        for operand, (value, own) in operands.items():
            self._count(name, recipe, state, operand, value.detach(), own)
        y.register_hook(lambda dy: self._count(name, recipe, state, "dy", dy, sizes))  # type: ignore[no-untyped-call]

    def _count(
        self,
        name: str,
        recipe: Recipe,
        state: DelayedState | None,
        operand: Operand,
        value: Tensor,
        sizes: Tensor | None,
    ) -> None:
        spec = recipe.quantizer(operand)
        if spec is None:
            return
        scale = None if state is None else state.encode_scale(operand)
        seed = 0 if spec.stochastic else None
        stats = tensor_stats(value, spec, sizes, scale=scale, seed=seed, rows=WINDOW)
        self.counted.setdefault(name, {})[operand] = stats.total()

    def numbers(self) -> dict[str, dict[str, dict[str, float]]]:
        """By layer and operand."""
        return {
            name: {
                operand: numbers_of([float(getattr(stats, field)) for field in FIELDS])
                for operand, stats in operands.items()
            }
            for name, operands in self.counted.items()
        }


class Experts(nn.Module):
    """Router and experts over [tokens, width]; returns the outputs, the balance loss and the rows of each expert.

    form   the experts are one `moe_mlp`, which keeps this for the backward; None: two grouped layers
    """

    def __init__(self, config: TrainConfig, recipe: Recipe, form: Form | None = None) -> None:
        super().__init__()
        self.form: Form | None = form
        self.top_k, self.recipe = config.top_k, recipe
        self.router = nn.Linear(config.width, config.experts, bias=False)
        self.fc1 = nn.Parameter(torch.empty(config.experts, 2 * config.hidden, config.width))
        self.fc2 = nn.Parameter(torch.empty(config.experts, config.width, config.hidden))
        self.watch: Watch | None = None
        self.states: list[DelayedState | None] = [None, None]
        if isinstance(recipe, DelayedScaling):
            self.states = [DelayedState.create(recipe, config.experts, self.fc1.device) for _ in range(2)]

    def forward(self, x: Tensor, seeds: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
        tokens, experts = len(x), len(self.fc1)
        probabilities = torch.softmax(self.router(x), dim=-1)
        weights, chosen = probabilities.topk(self.top_k)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        sizes = torch.bincount(chosen.flatten(), minlength=experts).to(torch.int32)
        share = sizes / (tokens * self.top_k)
        balance = experts * (share * probabilities.mean(dim=0)).sum()
        if self.form is not None:
            y = moe_mlp(
                x.bfloat16(), chosen, weights, self.fc1.bfloat16(), self.fc2.bfloat16(), recipe=self.recipe,
                form=self.form, seed=seeds[0],
            )  # fmt: skip
            return y.float(), balance, sizes

        order = torch.argsort(chosen.flatten(), stable=True)
        rows = x[order // self.top_k].bfloat16()
        gate, up = self._grouped(0, rows, self.fc1, sizes, seeds).float().chunk(2, dim=-1)
        rows = (functional.silu(gate) * up).bfloat16()
        outputs = self._grouped(1, rows, self.fc2, sizes, seeds).float()

        outputs = outputs[torch.argsort(order)].view(tokens, self.top_k, -1)
        return (outputs * weights[..., None]).sum(dim=1), balance, sizes

    def _grouped(self, index: int, x: Tensor, weight: Tensor, sizes: Tensor, seeds: tuple[int, int]) -> Tensor:
        state = self.states[index]
        if state is not None and not self.training:
            # Recording would let evaluations change the scales that training uses.
            state = DelayedState(state.recipe, state.history.clone(), state.scale)
        weight = weight.bfloat16()
        y = grouped_linear(x, weight, sizes, recipe=self.recipe, seed=seeds[index], state=state)
        if self.watch is not None:
            self.watch.look(f"fc{index + 1}", self.recipe, state, {"x": (x, sizes), "w": (weight, None)}, y)
        return y

    def end_step(self) -> None:
        """Make delayed scaling's next scales; nothing for other recipes."""
        for state in self.states:
            if state is not None:
                state.update()


class Layer(nn.Module):
    """Mixing and experts, each after a norm and with a residual connection."""

    def __init__(self, config: TrainConfig, recipe: Recipe, form: Form | None) -> None:
        super().__init__()
        self.mixing_norm = nn.RMSNorm(config.width, eps=NORM_EPSILON)
        self.mixing = Mixing(config)
        self.expert_norm = nn.RMSNorm(config.width, eps=NORM_EPSILON)
        self.experts = Experts(config, recipe, form)

    def forward(self, x: Tensor, seeds: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
        x = x + self.mixing(self.mixing_norm(x))
        mixed, balance, sizes = self.experts(self.expert_norm(x).flatten(0, 1), seeds)
        return x + mixed.view_as(x), balance, sizes


class LanguageModel(nn.Module):
    """Logits [batch, context, vocabulary] of token ids [batch, context]."""

    def __init__(self, config: TrainConfig, recipe: Recipe, vocabulary: int, form: Form | None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, config.width)
        self.position = nn.Parameter(torch.empty(config.context, config.width))
        self.layers = nn.ModuleList(Layer(config, recipe, form) for _ in range(config.layers))
        self.final_norm = nn.RMSNorm(config.width, eps=NORM_EPSILON)
        self.logits = nn.Linear(config.width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, seeds: list[tuple[int, int]]) -> tuple[Tensor, Tensor, Tensor]:
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        balances, loads = [], []
        for layer, layer_seeds in zip(self.layers, seeds, strict=True):
            x, balance, sizes = layer(x, layer_seeds)
            balances.append(balance)
            loads.append(sizes)
        return self.logits(self.final_norm(x)), torch.stack(balances).mean(), torch.stack(loads)


class TorchModel:
    """`LanguageModel` with its optimizer: what the loop drives; `form` as Experts has it."""

    def __init__(
        self, config: TrainConfig, recipe: Recipe, vocabulary: int, seed: int, device: str, form: Form | None = None
    ) -> None:
        self._config, self._seed, self._device = config, seed, torch.device(device)
        with self._device:
            self._model = LanguageModel(config, recipe, vocabulary, form)
        self._named = dict(self._parameters_by_name())
        with torch.no_grad():
            for name, value in initial_parameters(config, vocabulary, seed).items():
                self._named[name].copy_(torch.from_numpy(value))
        beta1, beta2, epsilon = ADAM
        self._optimizer = torch.optim.Adam(self._model.parameters(), betas=(beta1, beta2), eps=epsilon)

    def step(self, tokens: Tokens, step: int, *, observe: bool = False) -> StepResult:
        """One Adam step on [batch, context + 1] tokens."""
        blocks = [module for module in self._model.modules() if isinstance(module, Experts)]
        for block in blocks:
            block.watch = Watch() if observe else None
        losses, balance, load = self._losses(tokens, step)
        loss = losses.mean()
        self._optimizer.zero_grad(set_to_none=True)
        (loss + self._config.balance * balance).backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.get_total_norm([p.grad for p in self._model.parameters() if p.grad is not None])
        health = {
            f"layer{number}.{name}": operands
            for number, block in enumerate(blocks)
            if block.watch is not None
            for name, operands in block.watch.numbers().items()
        }
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self._config, step)
        self._optimizer.step()
        for block in blocks:
            block.watch = None
            block.end_step()
        return StepResult(loss.item(), balance.item(), load.cpu().numpy().astype(np.int64), norm.item(), health)

    @torch.no_grad()
    def evaluate(self, tokens: Tokens) -> NDArray[np.float64]:
        """[sequences] mean cross entropy of each sequence."""
        self._model.eval()
        losses, _, _ = self._losses(tokens, self._config.steps)
        self._model.train()
        return losses.mean(dim=1).double().cpu().numpy()

    def expert_weights(self) -> dict[str, Array]:
        """The grouped layers' weights [experts, out, in]."""
        return {name: self._named[name].detach().cpu().numpy() for name in expert_names(self._config)}

    def _losses(self, tokens: Tokens, step: int) -> tuple[Tensor, Tensor, Tensor]:
        ids = torch.from_numpy(tokens).to(self._device, torch.int64)
        seeds = [rounding_seed(self._seed, step, layer) for layer in range(self._config.layers)]
        logits, balance, load = self._model(ids[:, :-1], [(seed, seed ^ FC2_SEED) for seed in seeds])
        return functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none"), balance, load

    def _parameters_by_name(self) -> list[tuple[str, nn.Parameter]]:
        """The names of `initial_parameters` for this module tree's parameters."""

        def plain(name: str) -> str:
            name = name.removesuffix(".weight").replace("layers.", "layer", 1)
            return name.replace(".mixing.", ".").replace(".experts.", ".")

        return [(plain(name), parameter) for name, parameter in self._model.named_parameters()]
