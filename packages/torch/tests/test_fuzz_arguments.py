"""Every argument of every public function of octavo_torch, with anything in its place: it works or a sentence says why.

A refusal is a ValueError, or NoBackendError where nothing serves the call: one line that names the argument and says
what to give.
"""

from __future__ import annotations

import atexit
import inspect
from collections.abc import Callable
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from fuzzing import BACKEND, DELAYED, SPEC, G, K, M, N, judge, judge_kinds, leaf, with_anything

import octavo_torch as ot
from octavo import MXFP8, NVFP4, BlockScaling, QuantizerSpec

SPEC_DELAYED = QuantizerSpec(scaling="delayed", format="e4m3")


def weights_of_choices() -> tuple[torch.Tensor, ot.Routing]:
    rows, _, routing = ot.permute(torch.ones(M, K), torch.zeros(M, 1, dtype=torch.int64), G)
    return rows, routing


def linear(**more: Any) -> dict[str, Any]:
    return {
        "x": leaf(M, K),
        "weight": leaf(G, N, K),
        "group_sizes": [3, 4],
        "recipe": MXFP8(),
        "backend": BACKEND,
        **more,
    }


def mlp(**more: Any) -> dict[str, Any]:
    given = {"x": leaf(M, K), "w1": leaf(G, 2 * N, K), "w2": leaf(G, K, N), "group_sizes": [3, 4], "recipe": MXFP8()}
    return {**given, "backend": BACKEND, **more}


def moe(**more: Any) -> dict[str, Any]:
    routed = {"choices": torch.zeros(M, 1, dtype=torch.int64), "weights": torch.ones(M, 1)}
    return {"x": leaf(M, K), **routed, "w1": leaf(G, 2 * N, K), "w2": leaf(G, K, N), "recipe": MXFP8(),
            "backend": BACKEND, **more}  # fmt: skip


def fused(**more: Any) -> dict[str, Any]:
    return {"spec": SPEC, "group_sizes": [3, 4], "backend": BACKEND, **more}


def layer(**more: Any) -> ot.GroupedLinear:
    return ot.GroupedLinear(G, K, N, backend=BACKEND, **more)


def adapted() -> ot.GroupedLinear:
    made = layer()
    ot.add_lora(made, 4)
    return made


def one_expert_each() -> dict[str, torch.Tensor]:
    shapes = {"w1": (N, K), "w3": (N, K), "w2": (K, N)}
    return {f"experts.{g}.{name}.weight": torch.ones(shape) for g in range(G) for name, shape in shapes.items()}


@cache
def published() -> Path:
    """A folder with the FP8 experts of `experts_of_codes`."""
    folder = Path(mkdtemp())
    atexit.register(rmtree, folder)
    ot.export_experts(experts_of_codes(), folder, "compressed-tensors")
    return folder


def new_folder() -> str:
    """A path that nothing is at, below a folder that is removed at the end."""
    return mkdtemp(dir=published())


def experts_of_codes() -> ot.GroupedMLP:
    return ot.GroupedMLP(G, K, N, recipe=BlockScaling(), backend=BACKEND)


def stepped() -> ot.AdamW:
    """With 8-bit states and masters, after a step."""
    parameter = torch.nn.Parameter(torch.ones(N, K, dtype=torch.bfloat16))
    parameter.grad = torch.ones_like(parameter)
    optimizer = ot.AdamW([parameter], state_bits=8)
    optimizer.step()
    return optimizer


CALLS: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]]]] = {
    "grouped_linear": (ot.grouped_linear, lambda: linear(bias=leaf(G, N), bias_scales=torch.ones(M))),
    "grouped_linear, stateful": (
        ot.grouped_linear,
        lambda: linear(recipe=DELAYED, state=ot.DelayedState.create(DELAYED, G)),
    ),
    "grouped_linear, stochastic": (ot.grouped_linear, lambda: linear(recipe=NVFP4(), seed=1)),
    "grouped_mlp": (
        ot.grouped_mlp,
        lambda: mlp(probs=torch.ones(M), bias1=leaf(G, 2 * N), bias2=leaf(G, K), bias2_scales=torch.ones(M)),
    ),
    "AdamW": (ot.AdamW, lambda: {"params": [leaf(N, K)], "lr": torch.tensor(1e-3)}),
    "AdamW.load_state_dict": (stepped().load_state_dict, lambda: {"state_dict": stepped().state_dict()}),
    "AdamW.clip_grad_norm_": (lambda **given: stepped().clip_grad_norm_(**given), lambda: {"max_norm": 1.0}),
    "grouped_mm": (
        ot.grouped_mm,
        lambda: {
            "a": leaf(M, K),
            "b": leaf(G, K, N),
            "offs": torch.tensor([3, 7], dtype=torch.int32),
            "recipe": MXFP8(),
        },
    ),
    "quantize": (ot.quantize, lambda: {"x": torch.ones(M, K), "spec": SPEC, "group_sizes": [3, 4], "backend": BACKEND}),
    "quantize, delayed": (
        ot.quantize,
        lambda: {"x": torch.ones(M, K), "spec": SPEC_DELAYED, "group_sizes": [3, 4], "scale": torch.ones(G)},
    ),
    "quantize_weight": (ot.quantize_weight, lambda: {"w": leaf(G, N, K), "recipe": MXFP8(), "backend": BACKEND}),
    "dequantize": (ot.dequantize, lambda: {"q": ot.quantize(torch.ones(M, K), SPEC, backend=BACKEND)}),
    "convert_layout": (
        ot.convert_layout,
        lambda: {"q": ot.quantize(torch.ones(M, K), SPEC, backend=BACKEND), "layouts": ("plain", "plain")},
    ),
    "group_amax": (ot.group_amax, lambda: {"x": torch.ones(M, K), "group_sizes": [3, 4]}),
    "act_quantize": (ot.act_quantize, lambda: fused(x=torch.ones(M, 2 * N), activation="swiglu", probs=torch.ones(M))),
    "dact_quantize": (
        ot.dact_quantize,
        lambda: fused(dy=torch.ones(M, N), x=torch.ones(M, 2 * N), activation="swiglu", probs=torch.ones(M)),
    ),
    "norm_quantize": (
        ot.norm_quantize,
        lambda: fused(x=torch.ones(M, K), gamma=torch.ones(K), beta=torch.ones(K), norm="layer"),
    ),
    "explain_mlp": (ot.explain_mlp, mlp),
    "permute": (
        ot.permute,
        lambda: {
            "x": leaf(M, K),
            "expert_index": torch.zeros(M, 1, dtype=torch.int64),
            "num_groups": G,
            "backend": BACKEND,
        },
    ),
    "unpermute": (
        ot.unpermute,
        lambda: (
            dict(zip(("rows", "routing"), weights_of_choices(), strict=True))
            | {"weights": torch.ones(M, 1), "backend": BACKEND}
        ),
    ),
    "moe_mlp": (ot.moe_mlp, lambda: moe(bias1=leaf(G, 2 * N), bias2=leaf(G, K))),
    "choose_experts": (
        ot.choose_experts,
        lambda: {"logits": leaf(M, 4), "k": 2, "groups": 2, "kept_groups": 1, "bias": torch.zeros(4)},
    ),
    "choose_experts, replayed": (
        ot.choose_experts,
        lambda: {"logits": leaf(M, 4), "k": 2, "replay": torch.zeros(M, 2, dtype=torch.int64)},
    ),
    "router_losses": (
        ot.router_losses,
        lambda: {"logits": leaf(M, 4), "choices": torch.zeros(M, 2, dtype=torch.int64), "score": "sigmoid"},
    ),
    "bytes_kept": (
        ot.bytes_kept,
        lambda: {"recipe": MXFP8(), "shape": ot.MoeShape(M, 1, G, K, N), "form": "lean", "backend": BACKEND},
    ),
    "MoE": (
        ot.MoE,
        lambda: {"num_experts": G, "in_features": K, "hidden_features": N, "k": 1, "recipe": MXFP8()},
    ),
    "Exchange": (
        ot.Exchange,
        lambda: {"payload": "mxfp8", "returns": "sums", "rows": 4, "pair_rows": 2, "route": "peer"},
    ),
    "Room": (ot.Room, lambda: {"gemms": 2, "w2": 8}),
    "explain_exchange": (ot.explain_exchange, lambda: {"recipe": MXFP8(), "ranks": 2, "exchange": ot.Exchange()}),
    "bytes_exchanged": (
        ot.bytes_exchanged,
        lambda: {
            "shape": ot.MoeShape(M, 1, G, K, N),
            "ranks": 2,
            "choices": torch.zeros(M, 1, dtype=torch.int64),
            "exchange": ot.Exchange(),
        },
    ),
    "MoE.choose": (
        lambda **given: ot.MoE(G, K, N, 1, recipe=MXFP8(), backend=BACKEND).choose(**given),
        lambda: {"x": leaf(M, K), "replay": torch.zeros(M, 1, dtype=torch.int64)},
    ),
    "MoE.forward": (
        lambda **given: ot.MoE(G, K, N, 1, recipe=MXFP8(), backend=BACKEND).forward(**given),
        lambda: {"x": leaf(M, K)},
    ),
    "activate": (ot.activate, lambda: {"x": leaf(M, 2 * N), "activation": "swiglu", "probs": torch.ones(M)}),
    "Activation": (ot.Activation, lambda: {"activation": "swiglu"}),
    "DelayedState.create": (ot.DelayedState.create, lambda: {"recipe": DELAYED, "num_groups": G}),
    "GroupedLinear": (
        ot.GroupedLinear,
        lambda: {"num_groups": G, "in_features": K, "out_features": N, "recipe": MXFP8(), "seed": 1},
    ),
    "GroupedLinear.forward": (
        lambda **given: layer(recipe=MXFP8()).forward(**given),
        lambda: {"x": leaf(M, K), "group_sizes": [3, 4]},
    ),
    "Linear.forward": (
        lambda **given: ot.Linear(K, N, recipe=MXFP8(), backend=BACKEND).forward(**given),
        lambda: {"x": leaf(M, K)},
    ),
    "GroupedMLP": (
        ot.GroupedMLP,
        lambda: {"num_groups": G, "in_features": K, "hidden_features": N, "out_features": K, "recipe": MXFP8()},
    ),
    "GroupedMLP.forward": (
        lambda **given: ot.GroupedMLP(G, K, N, recipe=MXFP8(), backend=BACKEND).forward(**given),
        lambda: {"x": leaf(M, K), "group_sizes": [3, 4], "probs": torch.ones(M)},
    ),
    "GroupedLoRA": (
        ot.GroupedLoRA,
        lambda: {"num_groups": G, "in_features": K, "out_features": N, "rank": 4, "alpha": 8, "dropout": 0.1},
    ),
    "GroupedLoRA.forward": (
        lambda **given: ot.GroupedLoRA(G, K, N, 4, backend=BACKEND).forward(**given),
        lambda: {"x": leaf(M, K), "group_sizes": [3, 4]},
    ),
    "GroupedLoRA.merged_weight": (
        lambda **given: ot.GroupedLoRA(G, K, N, 4).merged_weight(**given),
        lambda: {"weight": leaf(G, N, K)},
    ),
    "GroupedLoRA.train_groups": (
        lambda **given: ot.GroupedLoRA(G, K, N, 4).train_groups(**given),
        lambda: {"groups": [1]},
    ),
    "PackedWeight": (
        ot.PackedWeight,
        lambda: {
            "blocks": torch.zeros(G, N, K, dtype=torch.uint8),
            "scales": torch.zeros(G, N, 1, dtype=torch.uint8),
            "recipe": MXFP8(),
            "dtype": torch.bfloat16,
        },
    ),
    "add_lora": (ot.add_lora, lambda: {"module": layer(), "rank": 4, "alpha": 8, "dropout": 0.1, "filter": "*"}),
    "merge_lora": (ot.merge_lora, lambda: {"module": adapted()}),
    "Sequential": (lambda operation: ot.Sequential(operation), lambda: {"operation": layer()}),
    "Sequential.forward": (
        lambda **given: ot.Sequential(layer(), ot.Activation("swiglu")).forward(**given),
        lambda: {"x": leaf(M, K), "group_sizes": [3, 4], "probs": torch.ones(M)},
    ),
    "convert": (ot.convert, lambda: {"model": layer(), "recipe": MXFP8(), "filter": "*"}),
    "convert_linears": (
        ot.convert_linears,
        lambda: {"model": torch.nn.Sequential(torch.nn.Linear(K, N)), "recipe": MXFP8(), "filter": "*"},
    ),
    "tensor_stats": (
        ot.tensor_stats,
        lambda: {"x": torch.ones(M, K), "spec": SPEC, "group_sizes": [3, 4], "rows": 128},
    ),
    "observe": (ot.observe, lambda: {"model": layer(), "every": 10, "rows": 128}),
    "update_scales": (ot.update_scales, lambda: {"module": layer()}),
    "stack_experts": (ot.stack_experts, lambda: {"state_dict": one_expert_each(), "experts": [1], "interleave": 2}),
    "load_experts": (
        ot.load_experts,
        lambda: {"module": experts_of_codes(), "path": published(), "experts": range(G), "device": "cpu"},
    ),
    "export_experts": (
        lambda **given: ot.export_experts(folder=new_folder(), **given),  # any text would be a folder here
        lambda: {
            "module": experts_of_codes(),
            "layout": "compressed-tensors",
            "others": {},
            "config": {},
            "shard_bytes": 1 << 20,
        },
    ),
    "expert_tensors": (ot.expert_tensors, lambda: {"module": experts_of_codes(), "layout": "compressed-tensors"}),
    "unstack_experts": (
        ot.unstack_experts,
        lambda: {"state_dict": ot.stack_experts(one_expert_each()), "names": ("w1", "w3", "w2"), "first": 1},
    ),
}
MODULE = ("backend", "device", "dtype", "bias", "main_grad", "per_group_parameters", "delay_wgrad", "room")
FUSED = ("layouts", "seed", "operand", "group_offset", "scale", "wanted")
MORE = {
    "AdamW": ("betas", "eps", "weight_decay", "master_dtype", "state_bits", "seed", "capturable", "masters"),
    "AdamW.clip_grad_norm_": ("norm_type",),
    "grouped_linear": ("seed", "state", "group_offset", "out", "grad_input", "main_grad", "delayed_wgrad", "room"),
    "grouped_linear, stochastic": ("group_offset",),
    "grouped_mlp": (
        "activation", "interleave", "seed", "state", "group_offset", "out", "grad_input", "main_grad", "delayed_wgrad",
        "room",
    ),
    "moe_mlp": (
        "activation", "interleave", "form", "weight_codes", "seed", "state", "group_offset", "main_grad",
        "delayed_wgrad", "ep", "exchange", "room",
    ),
    "choose_experts": ("score", "renormalize", "scale", "replay", "backend"),
    "router_losses": ("sequences",),
    "bytes_kept": ("weight_codes", "activation", "dtype", "device", "transposed"),
    "Exchange": ("left_out",),
    "bytes_exchanged": ("dtype",),
    "explain_exchange": ("dtype", "device"),
    "MoE": (
        "out_features", "score", "groups", "kept_groups", "renormalize", "scale", "choice_bias", "form", "weight_codes",
        "activation", "seed", "interleave", "ep", "exchange", *MODULE,
    ),
    "MoE.forward": ("choice", "weights", "lora"),
    "grouped_mm": ("bias", "seed", "out_dtype"),
    "quantize": ("seed", "operand", "group_offset", "scale", "layouts", "out", "unchanged"),
    "quantize_weight": ("seed", "state", "interleave", "out", "unchanged", "record"),
    "dequantize": ("direction", "dtype", "backend"),
    "convert_layout": ("backend",),
    "act_quantize": FUSED,
    "dact_quantize": FUSED,
    "norm_quantize": ("epsilon", *FUSED),
    "explain_mlp": ("activation",),
    "DelayedState.create": ("device",),
    "GroupedLinear": MODULE,
    "GroupedLinear.forward": ("weight", "bias_scales", "out", "grad_input", "lora"),
    "Linear.forward": ("weight", "out", "grad_input", "lora"),
    "GroupedMLP": ("activation", "seed", "interleave", *MODULE),
    "GroupedMLP.forward": ("weights", "bias2_scales", "lora"),
    "GroupedLoRA": ("rank_stabilized", "device", "dtype", "backend"),
    "PackedWeight": ("interleave",),
    "add_lora": ("rank_stabilized", "targets", "dtype"),
    "Sequential.forward": ("bias_scales", "bias2_scales"),
    "convert": ("seed", "backend"),
    "convert_linears": ("seed", "backend"),
    "tensor_stats": ("direction", "seed", "scale", "rows"),
    "update_scales": ("process_group",),
    "stack_experts": ("names",),
    "unstack_experts": ("interleave",),
    "load_experts": ("prefix", "names", "weights", "exact"),
    "export_experts": ("prefix", "names", "first"),
    "expert_tensors": ("prefix", "names", "first"),
}  # fmt: skip
"""Arguments that the valid call leaves out."""

CASES = [(name, argument) for name, (_, valid) in CALLS.items() for argument in (*valid(), *MORE.get(name, ()))]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "argument"), CASES, ids=[f"{name}({argument})" for name, argument in CASES])
@with_anything
def test_it_works_or_a_sentence_says_why(name: str, argument: str, value: Any) -> None:
    """No other exception ever gets out, and the refusal names the argument (faults.md 58, 61)."""
    if argument == "filter" and callable(value):
        return  # a function of the caller's raises what it likes
    function, valid = CALLS[name]
    arguments = valid() | {argument: value}
    judge(function, arguments, argument, value)


TENSORS = [
    (name, argument)
    for name, (_, valid) in CALLS.items()
    for argument, value in valid().items()
    if isinstance(value, torch.Tensor)
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "argument"), TENSORS, ids=[f"{name}({argument})" for name, argument in TENSORS])
def test_a_tensor_of_another_kind_works_or_a_sentence_says_why(name: str, argument: str) -> None:
    """Sparse, without data, of another dtype, a slice, without rows: in the place of each tensor of each function, with
    gradients and without."""
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            judge_kinds(*CALLS[name], argument)


def test_every_public_argument_is_there() -> None:
    """A new argument of a function in the table is fuzzed, or this test fails."""
    for name, (function, valid) in CALLS.items():
        if function.__name__ != "<lambda>" and "," not in name:
            given = {*valid(), *MORE.get(name, ())}
            assert set(inspect.signature(function).parameters) == given, name
