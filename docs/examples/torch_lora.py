"""Trains adapters of rank 8 beside experts that are frozen FP8 codes, and stores the adapters alone.

    python docs/examples/torch_lora.py

A MoE block learns a teacher that differs from it by a low-rank change of every expert. It runs anywhere.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo_torch import MoE, add_lora, quantized_parameters

EXPERTS, WIDTH, HIDDEN, CHOICES = 4, 128, 128, 2


def model() -> MoE:
    """A block whose experts are codes alone, the same one each time."""
    torch.manual_seed(0)
    with quantized_parameters("fp8-block"):
        block = MoE(EXPERTS, WIDTH, HIDDEN, CHOICES, dtype=torch.bfloat16)
    block.router.requires_grad_(False)
    add_lora(block, 8, alpha=16, dtype=torch.float32)
    return block


def adapters_of(block: MoE) -> dict[str, Tensor]:
    """What training changes."""
    return {name: value for name, value in block.state_dict().items() if "lora_" in name}


def main() -> None:
    """Trains, prints the losses, stores and loads the adapters."""
    teacher, student = model(), model()
    with torch.no_grad():
        for name, parameter in teacher.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    own = [parameter for parameter in student.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(own, lr=2e-2, weight_decay=0.0)
    losses = []
    for _ in range(40):
        x = torch.randn(512, WIDTH).bfloat16()
        loss = (student(x) - teacher(x).detach()).float().square().mean()
        loss.backward()
        assert all(parameter.grad is not None for parameter in own)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    print("loss", " ".join(f"{loss:.5f}" for loss in losses[::13]))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "adapters.safetensors"
        save_file(adapters_of(student), file)
        again = model()
        missing, unexpected = again.load_state_dict(load_file(file), strict=False)
        assert not unexpected
        assert not [name for name in missing if "lora_" in name]
        assert torch.equal(again(x), student(x))
        print(f"stored {file.stat().st_size} bytes of adapters")


if __name__ == "__main__":
    main()
