"""LigerCute's MoE layer over the GPUs of one host: liger-kernel and liger-cute-kernels, without which it is no module.

Its kernels compute in bf16 and reach other ranks' tokens through NVSHMEM, whose runtime is set up once for a process.
`octavo_bench.peers.loading.loaded` imports this file where the packages are.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import liger_cute_kernels
import torch
import torch.distributed as dist
from liger_cute_kernels import nvshmem
from liger_kernel.ops.cute.ops.moe import moe_fused
from torch import Tensor

from octavo_bench.harness.timing import Call


def layer_call(x: Tensor, choices: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, dy: Tensor, experts: int) -> Call:
    """A step that returns the gradients of x [T, K], w1 [G, 2 F, K], w2 [G, K, F] and weights [T, k].

    experts   of all ranks, G on each of them
    """
    tokens, hidden = x.shape
    top = choices.shape[1]
    _configure(tokens, hidden, experts, top)
    gate, up = (half.detach().contiguous().requires_grad_() for half in w1.chunk(2, 1))
    index = choices.to(torch.int32)

    def step() -> Sequence[Tensor]:
        y = moe_fused(x, index, weights.to(x.dtype), gate, up, w2, experts, top)  # in fp32 it refuses weights
        dx, dgate, dup, dw2, dweights = torch.autograd.grad(y, [x, gate, up, w2, weights], dy)
        return dx, torch.cat([dgate, dup], 1), dw2, dweights

    return step


def _configure(tokens: int, hidden: int, experts: int, top: int) -> None:
    # all ranks are on one host, and the layer has no use for multicast memory, which the runtime would set up
    os.environ.setdefault("NVSHMEM_REMOTE_TRANSPORT", "none")
    os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")
    liger_cute_kernels.configure(
        bootstrap_group=dist.group.WORLD,
        device=torch.device("cuda", torch.cuda.current_device()),
        moe=liger_cute_kernels.MoEConfig(
            max_tokens=tokens, hidden_size=hidden, num_experts=experts, top_k=top, num_hosts=1,
            gpus_per_host=dist.get_world_size(),
        ),
    )  # fmt: skip


def finish() -> None:
    """Ends the runtime, before the process group ends; every rank calls it."""
    torch.cuda.synchronize()
    nvshmem.finalize()
