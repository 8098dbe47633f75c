"""A router's product and its gradients by tensor cores, beside products of fp32, and a MoE layer with either.

python benchmarks/router_logits.py OUTPUT COMMIT

Tokens are bf16, routers bf16 or fp32, on a CUDA device. The two ways take turns in one process; products run in CUDA
graphs or in one jit, layers of torch in graphs of a step. "kept" is what stays allocated between forward and backward
beside x and the router. "error" is the largest deviation from float64, in units of 2^-24 of the sum of absolute
products.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from layers import MOE
from replays import TURNS, graph_of, in_turns
from torch import Tensor
from torch.nn.functional import linear

import octavo_torch as ot
from octavo_bench.harness.timing import host_times_in_turn
from octavo_torch.moe import module
from octavo_torch.moe.router.logits import router_logits

SHAPES = {
    "Qwen3-30B: 8192 x 2048, 128 experts": (8192, 2048, 128),
    "DSv3: 4096 x 7168, 256 experts": (4096, 7168, 256),
}
DTYPES = ("bfloat16", "float32")
CALLS, STEPS = 20, 4
FP32, PARTS = "fp32", "tensor cores"


def logits_in_fp32(x: Tensor, router: Tensor) -> Tensor:
    """As torch composes them."""
    return linear(x.float(), router.float())


def error(made: Tensor, left: Tensor, right: Tensor) -> float:
    """Of left @ right."""
    exact, size = left.double() @ right.double(), left.double().abs() @ right.double().abs()
    return round(((made.double() - exact).abs() / size).max().item() * 2**24, 2)


def products(shape: tuple[int, int, int], dtype: str) -> dict[str, Any]:
    """torch: forward, and forward and both gradients."""
    tokens, features, experts = shape
    torch.manual_seed(0)
    x = torch.randn(tokens, features, device="cuda").bfloat16().requires_grad_()
    router = (torch.randn(experts, features, device="cuda") / 32).to(getattr(torch, dtype)).requires_grad_()
    dy = torch.randn(tokens, experts, device="cuda")
    ways = {FP32: logits_in_fp32, PARTS: router_logits}

    def forward(way: Any) -> Tensor:
        with torch.no_grad():
            result: Tensor = way(x, router)
        return result

    def both(way: Any) -> Any:
        return torch.autograd.grad(way(x, router), (x, router), dy)

    result: dict[str, Any] = {"forward_us": {}, "step_us": {}, "kept_bytes": {}, "error": {}}
    for name, way in ways.items():
        before = torch.cuda.memory_allocated()
        y = way(x, router)
        result["kept_bytes"][name] = torch.cuda.memory_allocated() - before - y.nbytes
        result["error"][name] = {"logits": error(y, x, router.t())}
        if dtype == "float32":
            result["error"][name]["drouter"] = error(torch.autograd.grad(y, router, dy)[0], dy.t(), x)
        del y
    for name, run in (("forward_us", forward), ("step_us", both)):
        result[name] = in_turns({way: graph_of(partial(run, ways[way]), CALLS).replay for way in ways}, CALLS)
    return result


def layer(dtype: str) -> dict[str, Any]:
    """torch: a step of a MoE layer of Qwen3-30B in block scaling, its router of `dtype`."""
    tokens, k, experts, features, hidden = MOE["Qwen3-30B"]
    torch.manual_seed(0)
    moe = ot.MoE(experts, features, hidden, k, recipe="fp8-block", device="cuda", dtype=torch.bfloat16)
    moe.router.data = moe.router.data.to(getattr(torch, dtype))
    x = torch.randn(tokens, features, device="cuda").bfloat16().requires_grad_()
    dy = torch.randn(tokens, features, device="cuda").bfloat16()

    def step(way: Any) -> None:
        module.router_logits = way
        torch.autograd.grad(moe(x), [x, *moe.parameters()], dy)

    ways = {FP32: logits_in_fp32, PARTS: router_logits}
    kept = {}
    for name, way in ways.items():
        module.router_logits = way
        before = torch.cuda.memory_allocated()
        y = moe(x)
        kept[name] = round((torch.cuda.memory_allocated() - before - y.nbytes) / tokens)
        del y
    runs = {name: graph_of(partial(step, way), STEPS).replay for name, way in ways.items()}
    return {"step_us": in_turns(runs, STEPS), "kept_bytes_per_token": kept}


def in_jax(shape: tuple[int, int, int], dtype: str) -> dict[str, Any]:
    """JAX: the logits, their sum of squares, and both gradients, in one jit of several steps."""
    import jax
    import jax.numpy as jnp

    from octavo_jax.moe.router.logits import router_logits as logits_of

    tokens, features, experts = shape
    keys = jax.random.split(jax.random.key(0), 2)
    x = jax.random.normal(keys[0], (tokens, features), jnp.bfloat16)
    router = (jax.random.normal(keys[1], (features, experts)) / 32).astype(dtype)
    default = "highest" if dtype == "float32" else None

    def way(name: str) -> Any:
        def loss(x: Any, router: Any) -> Any:
            if name == FP32:
                y = jnp.matmul(x, router, precision=default, preferred_element_type=jnp.float32)
            else:
                y = logits_of(x, router)
            return jnp.sum(y * y)

        def steps(x: Any, router: Any) -> Any:
            for _ in range(STEPS):
                x, router = (a + 0 * g for a, g in zip((x, router), jax.grad(loss, (0, 1))(x, router), strict=True))
            return x, router

        return jax.jit(steps)

    def run(steps: Any) -> None:
        for _ in range(CALLS):
            made = steps(x, router)
        jax.block_until_ready(made)

    ways = (FP32, PARTS)
    times = host_times_in_turn([[partial(run, way(name))] for name in ways], TURNS)
    return {"step_us": {name: round(each.median / CALLS / STEPS, 2) for name, each in zip(ways, times, strict=True)}}


def main() -> None:
    """The command; `--help` says what it takes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("commit")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for dtype in DTYPES:
        for name, shape in SHAPES.items():
            rows.append({"framework": "torch", "what": name, "router": dtype, **products(shape, dtype)})
            print(rows[-1], flush=True)
            rows.append({"framework": "jax", "what": name, "router": dtype, **in_jax(shape, dtype)})
            print(rows[-1], flush=True)
        rows.append({"framework": "torch", "what": "MoE, Qwen3-30B, fp8-block", "router": dtype, **layer(dtype)})
        print(rows[-1], flush=True)
    import jax

    versions = {"python": platform.python_version(), "torch": torch.__version__, "jax": jax.__version__}
    document = {
        "command": "python benchmarks/router_logits.py OUTPUT COMMIT",
        "date": time.strftime("%Y-%m-%d"),
        "machine": torch.cuda.get_device_name(),
        "versions": versions,
        "commit": options.commit,
        "rows": rows,
    }
    options.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
