"""A mixture-of-experts block whose experts are on different ranks, with all_to_all_single between them.

    python docs/examples/torch_expert_parallel.py            two processes on this machine's CPU
    torchrun --nproc-per-node 4 docs/examples/torch_expert_parallel.py     one rank per GPU

Every rank has its own tokens and its own experts; the router is the same everywhere.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import octavo
from octavo_torch import ExpertExchange, GroupedMLP, permute, unpermute

WIDTH, HIDDEN, EXPERTS, TOKENS, STEPS = 64, 128, 8, 256, 6


class Block(nn.Module):
    """Route, send rows to their experts, compute, send them back, add up."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__()
        self.group = group
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False, device=device)
        mine = EXPERTS // group.size()
        self.experts = GroupedMLP(mine, WIDTH, HIDDEN, recipe=octavo.MXFP8(), device=device, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        """y [T, WIDTH] of tokens x [T, WIDTH]."""
        weights, experts = self.router(x.float()).softmax(-1).topk(2)
        rows, sizes, routing = permute(x, experts, EXPERTS)
        exchange = ExpertExchange(sizes, self.group)  # exchanges the sizes, too
        y = self.experts(exchange.to_experts(rows), exchange.group_sizes)
        return unpermute(exchange.from_experts(y, rows.shape[0]), routing, weights)


def train(rank: int, device: torch.device) -> None:
    """A few steps towards a target that each rank can compute for its tokens."""
    torch.manual_seed(0)
    block = Block(dist.group.WORLD, device)
    with torch.no_grad():
        for parameter in block.experts.parameters():
            parameter.add_(0.01 * rank)  # ranks have different experts
    optimizer = torch.optim.AdamW(block.parameters(), lr=3e-3)
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(rank)).to(device, torch.bfloat16)
    losses = []
    for _ in range(STEPS):
        loss = (block(x).float() - torch.tanh(x.float())).square().mean()
        loss.backward()
        # experts have the gradients of all ranks' tokens already; the router's are each rank's own
        dist.all_reduce(block.router.weight.grad)
        for parameter in block.parameters():
            parameter.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss)
        losses.append(f"{loss.item() / dist.get_world_size():.4f}")
    print(f"rank {rank} of {dist.get_world_size()}: loss {' '.join(losses)}", flush=True)


def alone(rank: int, store: str) -> None:
    """One of two processes on a CPU."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    train(rank, torch.device("cpu"))
    dist.barrier()  # neither leaves while the other still exchanges
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:  # torchrun's
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl")
        train(dist.get_rank(), device)
        dist.destroy_process_group()
    else:
        mp.spawn(alone, args=(sys.argv[1] if len(sys.argv) > 1 else tempfile.mktemp(),), nprocs=2)
