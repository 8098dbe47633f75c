"""GroupedLoRA: a low-rank adapter of one grouped weight, as a module."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Self

import torch
from torch import Tensor, nn

from octavo_torch.arrays.checks import brief, check_count, check_device, check_flag, known_backends
from octavo_torch.arrays.dtypes import DTYPE_NAMES, name_of
from octavo_torch.arrays.operands import check_layout, check_not_nested
from octavo_torch.arrays.sizes import GroupSizes
from octavo_torch.compiler.autocast import without_autocast
from octavo_torch.linear.call import Adapter
from octavo_torch.linear.coded_weight import CodedWeight, values_of
from octavo_torch.lora.low_rank import LowRank
from octavo_torch.mlp.packed_weight import PackedWeight
from octavo_torch.moe.parallel.group import ExpertGroup
from octavo_torch.moe.parallel.own_experts import check_sharded


class GroupedLoRA(nn.Module, Adapter):
    """delta[r] = scale * B[g] (A[g] x[r]) for every row r of group g; scale is alpha / rank (LoRA, arXiv 2106.09685).

    Parameters: lora_A [G, rank, K] and lora_B [G, N, rank]. B starts at zero, so the layer's result is at first what it
    is without the adapter. `add_lora` puts such modules beside the weights of grouped layers, which then add delta to
    their products. Both products run in x's dtype, whatever the recipe of the layer; A and B are cast to it, and their
    gradients back. Kept for the backward are x, which both share where a layer of values keeps it, and A x [M, rank].

    ep   the ranks that share the experts of the layer, of which the adapter has this rank's; None: this rank has all
    """

    num_groups: int
    in_features: int
    out_features: int
    rank: int
    lora_A: nn.Parameter  # noqa: N815  # the names that PEFT's files have
    lora_B: nn.Parameter  # noqa: N815
    trained: Tensor | None
    ep: ExpertGroup | None = None
    _trained_groups: tuple[int, ...] | None = None

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        rank: int,
        *,
        alpha: float | None = None,
        rank_stabilized: bool = False,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        backend: str | Sequence[str] | None = None,
    ) -> None:
        """A is uniform in +-1 / sqrt(in_features), which is what PEFT draws; B is zero.

        num_groups              G, the experts
        in_features             K
        out_features            N
        rank                    r, of each group's A and B. Products pad it with zeros to a multiple of 16
        alpha                   scale is alpha / rank; None: rank, so that scale is 1
        rank_stabilized         scale is alpha / sqrt(rank) (rsLoRA, arXiv 2312.03732)
        dropout                 probability with which, in training, an element of x is zero for the adapter alone; the
                                others are divided by 1 - dropout
        device, dtype           of the parameters; None: torch's defaults
        backend                 a name or a closed list of names; None: the registry's preference
        """
        super().__init__()
        sides = {"num_groups": num_groups, "in_features": in_features, "out_features": out_features, "rank": rank}
        for name, value in sides.items():
            check_count(name, value)
            setattr(self, name, value)
        check_flag("rank_stabilized", rank_stabilized)
        self.alpha = _positive("alpha", rank if alpha is None else alpha)
        self.rank_stabilized = rank_stabilized
        self.dropout = _probability(dropout)
        self.backend = known_backends(backend)
        check_device(device, torch.get_default_dtype() if dtype is None else dtype)
        self.lora_A = nn.Parameter(torch.empty(num_groups, rank, in_features, device=device, dtype=dtype))
        self.lora_B = nn.Parameter(torch.empty(num_groups, out_features, rank, device=device, dtype=dtype))
        self.register_buffer("trained", None, persistent=False)
        self.reset_parameters()

    def __setattr__(self, name: str, value: Tensor | nn.Module) -> None:
        check_sharded(self.__dict__.get("ep"), name, value)
        super().__setattr__(name, value)

    def reset_parameters(self) -> None:
        """A uniform in +-1 / sqrt(in_features), B zero."""
        bound = 1 / math.sqrt(self.in_features)
        nn.init.uniform_(self.lora_A, -bound, bound)
        nn.init.zeros_(self.lora_B)

    @property
    def scale(self) -> float:
        """What multiplies the product: alpha / rank, or alpha / sqrt(rank) where it is rank-stabilized."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)

    def train_groups(self, groups: Sequence[int] | None) -> None:
        """Train the adapters of these groups alone; None: of all. The others' gradients are zero.

        An optimizer that decays weights still decays theirs. Raises ValueError for a number that is no group's.
        """
        if groups is None:
            self.trained = self._trained_groups = None
            return
        given: list[object] = [*groups] if isinstance(groups, Sequence) else [groups]
        numbers = [one for one in given if isinstance(one, int) and not isinstance(one, bool)]
        wrong = [one for one in given if one not in numbers] + [n for n in numbers if not 0 <= n < self.num_groups]
        if wrong:
            raise ValueError(
                f"groups has {brief(wrong[0])}; give numbers of groups, from 0 to {self.num_groups - 1}, or None"
            )
        trained = torch.zeros(self.num_groups, 1, 1, dtype=torch.bool, device="cpu")
        trained[numbers] = True
        self.trained, self._trained_groups = trained.to(self.lora_A.device), tuple(numbers)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self._trained_groups is not None:
            self.train_groups(self._trained_groups)  # `to_empty` leaves the buffer uninitialized
        return self

    def forward(self, x: Tensor, group_sizes: GroupSizes | None) -> Tensor:
        """delta [M, N], or [..., N] of x [..., K]; rows past the sum of the sizes are zero, and x is not read there.

        group_sizes   as grouped_linear has it

        Raises as `grouped_linear` does.
        """
        if isinstance(x, Tensor):
            check_layout("x", x)
        if not isinstance(x, Tensor) or x.dtype not in DTYPE_NAMES or not x.dim() or x.shape[-1] != self.in_features:
            raise ValueError(f"x is {brief(x)}; give rows [M, {self.in_features}] in bfloat16, float16 or float32")
        if x.device != self.lora_A.device:
            raise ValueError(f"x is on {x.device} and the adapter on {self.lora_A.device}; move one of them there")
        return self.delta(x, group_sizes)

    def delta(self, x: Tensor, group_sizes: GroupSizes | None, interleave: int = 0) -> Tensor:
        """`forward` without its checks, and with columns in the order of the layer's: see linear.call.Adapter."""
        a, b = self._factors()
        dropped = self.dropout if self.training else 0.0
        return LowRank(a, b, self.scale, dropped, self.backend).delta(x, group_sizes, interleave)

    def _factors(self) -> tuple[Tensor, Tensor]:
        a, b = self.lora_A, self.lora_B
        if self.trained is None:
            return a, b
        return torch.where(self.trained, a, a.detach()), torch.where(self.trained, b, b.detach())

    @torch.no_grad()
    def delta_weight(self) -> Tensor:
        """scale * B A, fp32 [G, N, K]: the whole matrices that the adapter stands for."""
        with without_autocast(self.lora_A.device.type):
            return torch.matmul(self.lora_B.float(), self.lora_A.float()).mul_(self.scale)

    @torch.no_grad()
    def merged_weight(self, weight: Tensor) -> Tensor:
        """The values of `weight` [G, N, K] plus `delta_weight`, in fp32, rounded once to the weight's dtype.

        A CodedWeight or PackedWeight is dequantized. Raises ValueError for another shape.
        """
        shape = (self.num_groups, self.out_features, self.in_features)
        if isinstance(weight, Tensor):
            check_not_nested("weight", weight)  # the sum is torch's own, and right of DTensors
        if not isinstance(weight, Tensor) or tuple(weight.shape) != shape or weight.dtype not in DTYPE_NAMES:
            raise ValueError(f"weight is {brief(weight)}; give {list(shape)} in bfloat16, float16 or float32")
        if weight.device != self.lora_A.device:
            raise ValueError(f"weight is on {weight.device} and the adapter on {self.lora_A.device}; move one there")
        values: Tensor = weight.detach()
        if isinstance(weight, PackedWeight):
            values = weight.dequantize()
        elif isinstance(weight, CodedWeight):
            values = values_of(weight)
        return self.delta_weight().add_(values).to(weight.dtype)

    def extra_repr(self) -> str:
        """Shape, rank and scale."""
        return (
            f"num_groups={self.num_groups}, in_features={self.in_features}, out_features={self.out_features}, "
            f"rank={self.rank}, scale={self.scale:g}, dtype={name_of(self.lora_A.dtype)}"
            + (f", dropout={self.dropout:g}" if self.dropout else "")
        )


def _positive(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name} is {brief(value)}; give a number above 0")
    return float(value)


def _probability(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ValueError(f"dropout is {brief(value)}; give a probability of at least 0 and below 1")
    return float(value)
