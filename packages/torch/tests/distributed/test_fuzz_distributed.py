"""Arguments of what quantizes beforehand, shards, exchanges, saves, loads and adapts, with anything in their place."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import test_fuzz_arguments
import torch
import torch.distributed as dist
from fuzzing import BACKEND, SPEC, G, K, M, N, judge, judge_kinds, leaf, with_anything

import octavo_torch as ot
from octavo import MXFP8
from octavo_torch.adapters.grouped_mm import GroupedMM
from octavo_torch.adapters.transformers import experts

Given = Callable[[Path], dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A process group of this process, and a folder with a checkpoint of each kind."""
    made = tmp_path_factory.mktemp("saved")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ot.save_checkpoint(layer(), made / "file")
    ot.save_distributed(layer(), made / "sharded")
    yield made
    dist.destroy_process_group()


def layer(**more: Any) -> ot.GroupedLinear:
    return ot.GroupedLinear(G, K, N, recipe=MXFP8(), backend=BACKEND, **more)


def coded() -> ot.GroupedLinear:
    with ot.quantized_parameters("mxfp8"):
        return ot.GroupedLinear(G, K, N, backend=BACKEND)


def enter(context: AbstractContextManager[Any]) -> None:
    with context:
        pass


def exchange() -> ot.ExpertExchange:
    return ot.ExpertExchange(torch.tensor([3, 4]), dist.group.WORLD)


def received() -> ot.ExpertExchange:
    made = exchange()
    made.to_experts(torch.ones(M, K))
    return made


def moe_over_ranks(x: Any, choices: Any, weights: Any, w1: Any, w2: Any, ep: Any, exchange: Any) -> Any:
    return ot.moe_mlp(x, choices, weights, w1, w2, recipe="mxfp8", backend=BACKEND, ep=ep, exchange=exchange)


CALLS: dict[str, tuple[str, Callable[..., Any], Given]] = {
    "quantize_input": (
        "x weight group_sizes recipe seed state group_offset backend record",
        ot.quantize_input,
        lambda _: {"x": leaf(M, K), "weight": leaf(G, N, K), "group_sizes": [3, 4], "recipe": MXFP8()},
    ),
    "grouped_linear_quantized": (
        "x weight group_sizes quantizer scale recipe backend",
        ot.grouped_linear_quantized,
        lambda _: {
            "x": torch.ones(M, K),
            "weight": torch.ones(G, N, K),
            "group_sizes": [3, 4],
            "quantizer": SPEC,
            "recipe": MXFP8(),
            "backend": BACKEND,
        },
    ),
    "GroupedLinear.quantize_weight": (
        "out unchanged",
        lambda **given: layer().quantize_weight(**given),
        lambda _: {"out": None},
    ),
    "GroupedLinear.quantize_input": (
        "x group_sizes",
        lambda **given: layer().quantize_input(**given),
        lambda _: {"x": leaf(M, K), "group_sizes": [3, 4]},
    ),
    "GroupedLinear.backward_dw": ("count", lambda **given: layer(delay_wgrad=True).backward_dw(**given), lambda _: {}),
    "CodedWeight": (
        "codes recipe dtype interleave",
        ot.CodedWeight,
        lambda _: {"codes": layer().quantize_weight().codes, "recipe": MXFP8(), "dtype": torch.float32},
    ),
    "quantized_parameters": ("recipe", lambda **given: enter(ot.quantized_parameters(**given)), lambda _: {}),
    "MasterWeights": ("module dtype values", ot.MasterWeights, lambda _: {"module": coded()}),
    "MasterWeights.follow": ("optimizer", lambda **given: ot.MasterWeights(coded()).follow(**given), lambda _: {}),
    "ExpertExchange": (
        "group_sizes group",
        ot.ExpertExchange,
        lambda _: {"group_sizes": torch.tensor([3, 4]), "group": dist.group.WORLD},
    ),
    "ExpertExchange.to_experts": (
        "rows",
        lambda **given: exchange().to_experts(**given),
        lambda _: {"rows": torch.ones(M, K)},
    ),
    "ExpertExchange.from_experts": (
        "rows to",
        lambda **given: received().from_experts(**given),
        lambda _: {"rows": torch.ones(7, N), "to": M},
    ),
    "moe_mlp, over ranks": (
        "x choices weights w1 w2 ep exchange",
        moe_over_ranks,
        lambda _: {
            "x": leaf(M, K),
            "choices": torch.zeros(M, 1, dtype=torch.int64),
            "weights": leaf(M, 1),
            "w1": leaf(G, 2 * N, K),
            "w2": leaf(G, K, N),
            "ep": dist.group.WORLD,
            "exchange": ot.Exchange(),
        },
    ),
    "GroupedColumnParallel": ("reduce", ot.GroupedColumnParallel, lambda _: {}),
    "GroupedRowParallel": ("reduce", ot.GroupedRowParallel, lambda _: {}),
    "GroupedMLPParallel": ("reduce", ot.GroupedMLPParallel, lambda _: {}),
    "quantize_before_gather": ("module", ot.quantize_before_gather, lambda _: {}),
    "explain_gather": ("module", ot.explain_gather, lambda _: {}),
    "unchanged_weights": ("module", lambda **given: enter(ot.unchanged_weights(**given)), lambda _: {}),
    "recipe_state": ("module", ot.recipe_state, lambda _: {}),
    "check_recipe_state": (
        "module state",
        ot.check_recipe_state,
        lambda _: {"module": layer(), "state": ot.recipe_state(layer())},
    ),
    "save_checkpoint": (
        "module path quantized",
        ot.save_checkpoint,
        lambda folder: {"module": layer(), "path": folder / "written"},
    ),
    "load_checkpoint": (
        "module path recipes",
        ot.load_checkpoint,
        lambda folder: {"module": layer(), "path": folder / "file"},
    ),
    "save_distributed": (
        "module folder",
        ot.save_distributed,
        lambda folder: {"module": layer(), "folder": folder / "more"},
    ),
    "load_distributed": (
        "module folder",
        ot.load_distributed,
        lambda folder: {"module": layer(), "folder": folder / "sharded"},
    ),
    "adapters: GroupedMM": ("recipe seed backend", GroupedMM, lambda _: {"recipe": "mxfp8"}),
    "adapters: experts": ("recipe seed backend form weight_codes", experts, lambda _: {"recipe": "mxfp8"}),
}
"""Each function's arguments, the function, and a call that works."""

CASES = [(name, argument) for name, (arguments, *_) in CALLS.items() for argument in arguments.split()]
OTHERS = {
    *("ExchangeError", "ExchangedBytes", "ExchangePlan", "RowsLeftOutError"),
    *("DeviceSizesError", "DelayedWgrad", "Extras", "GroupedTensor", "QuantizedInput", "QuantizedWeight", "Routing"),
    *("Choice", "KeptBytes", "MoeShape", "Observation", "Observer", "RouterLosses", "TensorStats"),
    "check_errors",
}
"""Public names without arguments, and what functions return."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "argument"), CASES, ids=[f"{name}({argument})" for name, argument in CASES])
@with_anything
def test_it_works_or_a_sentence_says_why(name: str, argument: str, folder: Path, value: Any) -> None:
    """No other exception ever gets out, and the refusal names the argument (faults.md 51, 61)."""
    if argument in ("path", "folder") and isinstance(value, str | bytes):
        return  # the file system's to refuse
    _, function, given = CALLS[name]
    judge(function, given(folder) | {argument: value}, argument, value)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_a_tensor_of_another_kind_works_or_a_sentence_says_why(name: str, folder: Path) -> None:
    """Sparse, without data, of another dtype, a slice, without rows: in the place of each tensor of each function."""
    _, function, given = CALLS[name]
    for argument, valid in given(folder).items():
        if isinstance(valid, torch.Tensor):
            judge_kinds(function, partial(given, folder), argument)


def test_every_public_name_is_there() -> None:
    """A new public function is fuzzed here or in its neighbour, with every argument, or this test fails."""
    known = {re.split(r"[.,:]", name)[0] for name in (*CALLS, *test_fuzz_arguments.CALLS)}
    assert known - {"adapters"} == {*ot.__all__} - OTHERS
    for name, (arguments, function, _) in CALLS.items():
        parameters = inspect.signature(function).parameters
        if "given" not in parameters and "rest" not in parameters:
            assert {*parameters} == {*arguments.split()}, name
