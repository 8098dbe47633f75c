"""A MoE layer whose experts are on different ranks: one module, from tokens to combined tokens.

    python docs/examples/torch_moe_over_ranks.py            two processes on this machine's CPU
    torchrun --nproc-per-node 4 docs/examples/torch_moe_over_ranks.py     one rank per GPU, or with --cpu four processes

Every rank has its own tokens and its own experts; the router is the same everywhere.
"""

import os
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

import octavo
import octavo_torch

WIDTH, HIDDEN, EXPERTS, CHOICES, TOKENS, STEPS = 64, 128, 8, 2, 256, 6


def train(rank: int, device: torch.device) -> None:
    """A few steps towards a target that each rank can compute for its tokens."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("ep",))
    torch.manual_seed(rank)  # ranks have different experts
    exchange = octavo_torch.Exchange(payload="mxfp8")  # tokens and their gradients travel as codes
    layer = octavo_torch.MoE(
        EXPERTS, WIDTH, HIDDEN, CHOICES, recipe=octavo.MXFP8(), device=device, dtype=torch.bfloat16, ep=mesh["ep"],
        exchange=exchange,
    )  # fmt: skip
    dist.broadcast(layer.router.data, 0)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=3e-3)
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(rank)).to(device, torch.bfloat16)
    losses = []
    for _ in range(STEPS):
        loss = (layer(x).float() - torch.tanh(x.float())).square().mean()
        loss.backward()
        # experts have the gradients of all ranks' tokens already; the router's are each rank's own
        dist.all_reduce(layer.router.grad)
        for parameter in layer.parameters():
            parameter.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss)
        losses.append(f"{loss.item() / dist.get_world_size():.4f}")
    choices = layer.choose(x).choices
    shape = octavo_torch.MoeShape(TOKENS, CHOICES, EXPERTS, WIDTH, HIDDEN)
    sent = octavo_torch.bytes_exchanged(shape, dist.get_world_size(), exchange, choices=choices)
    print(
        f"rank {rank} of {dist.get_world_size()}: loss {' '.join(losses)}; {sent.travelling(rank)} bytes in a step",
        flush=True,
    )


def alone(rank: int, store: str) -> None:
    """One of two processes on a CPU."""
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    train(rank, torch.device("cpu"))
    dist.barrier()  # neither leaves while the other still exchanges
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:  # torchrun's
        on_cpu = "--cpu" in sys.argv
        device = torch.device("cpu") if on_cpu else torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        if not on_cpu:
            torch.cuda.set_device(device)
        dist.init_process_group("gloo" if on_cpu else "nccl", timeout=timedelta(seconds=60))
        train(dist.get_rank(), device)
        dist.barrier()
        dist.destroy_process_group()
    else:
        mp.spawn(alone, args=(tempfile.mktemp(),), nprocs=2)
