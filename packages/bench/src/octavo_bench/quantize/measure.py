"""One case measured: on a GPU its device time, the host's part and the peer's time; on a CPU one core and all."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from octavo_bench.harness.machine import cores
from octavo_bench.harness.shapes import Grouping
from octavo_bench.harness.timing import cuda_graph_times, cuda_times, host_times, input_copies
from octavo_bench.peers.compile import compiled, row_codes
from octavo_bench.quantize.bound import bound_call
from octavo_bench.quantize.case import Case
from octavo_bench.quantize.peer import peer_of
from octavo_bench.quantize.problem import Problem, Setting, dequantize_problem, quantize_problem

HOST_REPEATS = 30


def copy_rate(setting: Setting, repeats: int) -> float:
    """TB/s of a copy of the input to another tensor on the GPU, bytes read and written counted."""
    sources = _inputs(setting, setting.cols)
    pairs = [(torch.empty_like(source), source) for source in sources]
    calls = [partial(into.copy_, source) for into, source in pairs]
    return 2 * sources[0].nbytes / cuda_times(calls, repeats, warm_ms=300.0).median / 1e6


def measured_on_cuda(case: Case, setting: Setting, grouping: Grouping, repeats: int, *, peers: bool) -> dict[str, Any]:
    """Fields of a `QuantizeRow`: times, host, peer, notes."""
    if case.kind == "plan":
        return {"times": cuda_graph_times(setting.plan_call(), repeats)}
    inputs = _inputs(setting, _width(case, setting))
    problems = [_problem(case, setting, x) for x in inputs]
    facts: dict[str, Any] = {
        "times": cuda_times([problem.call for problem in problems], repeats),
        "input_copies": len(inputs),
        **_host(case, setting, inputs[0], HOST_REPEATS),
    }
    if peers:
        try:
            facts |= _peer(case, setting, grouping, inputs, problems[0], repeats)
        except Exception as error:  # a compiler that fails says nothing of our kernel
            facts["notes"] = (*facts.get("notes", ()), f"torch.compile: {' '.join(str(error).split())[:200]}")
    return facts


def measured_on_cpu(case: Case, setting: Setting, repeats: int) -> dict[str, Any]:
    """Fields of a `QuantizeRow`: times on one thread and on all cores, host, notes."""
    if case.kind == "plan":
        return {"times": host_times(setting.plan_call(), repeats)}
    x = setting.draw(_width(case, setting), setting.seed)
    every = replace(setting, threads=cores())
    one, all_of_them = _problem(case, setting, x), _problem(case, every, x)
    return {
        "times": host_times(one.call, repeats, warmup=1),
        "all_cores_us": host_times(all_of_them.call, repeats, warmup=1).median,
        **_host(case, setting, x, repeats),
    }


def _width(case: Case, setting: Setting) -> int:
    return setting.cols * (2 if case.swiglu else 1)


def _inputs(setting: Setting, cols: int) -> list[Tensor]:
    """As many different inputs as it takes to be out of the GPU's cache."""
    first = setting.draw(cols, setting.seed)
    count = input_copies(first.nbytes, torch.cuda.get_device_properties(0).L2_cache_size)
    return [first, *(setting.draw(cols, setting.seed + index) for index in range(1, count))]


def _problem(case: Case, setting: Setting, x: Tensor) -> Problem:
    if case.kind != "dequantize":
        return quantize_problem(case, setting, x)
    quantized = quantize_problem(replace(case, kind="quantize"), setting, x)
    quantized.call()
    return dequantize_problem(case, setting, quantized.planes)


def _host(case: Case, setting: Setting, x: Tensor, repeats: int) -> dict[str, Any]:
    call = bound_call(case, setting, x)
    if isinstance(call, str):
        return {"notes": (call,) if call else ()}
    times = host_times(call, repeats)
    if setting.cuda:
        torch.cuda.synchronize()
    return {"host": times}


def _peer(
    case: Case, setting: Setting, grouping: Grouping, inputs: list[Tensor], ours: Problem, repeats: int
) -> dict[str, Any]:
    plain = peer_of(case, grouping, setting.cols)
    if plain is None:
        return {}
    peer = compiled(plain)
    scales = (setting.encode_scales,) if case.recipe == "delayed" else ()
    theirs = row_codes(peer(inputs[0], *scales)).reshape(-1)
    equal = ours.planes["rowwise"].codes[: theirs.numel()] == theirs
    return {
        "peer_codes_equal": equal.double().mean().item(),
        "peer": cuda_times([partial(peer, x, *scales) for x in inputs], repeats),
    }
