"""Faults that users of comparable systems hit, and what here would catch each.

The tests are found in the suite itself: a docstring names the rows that its test covers, as "(faults 8, 14)".
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_KNOWN: tuple[tuple[int, str, str], ...] = (
    (1, "meta-pytorch/MSLK#158", "CUTLASS wgrad: empty experts leave at::empty NaN"),
    (2, "pytorch/pytorch#172439", "B200 `_grouped_mm` nonzero grad for zero-size groups (open)"),
    (3, "tgale96/grouped_gemm#36", "batch_sizes[i]==0 -> uninitialised output"),
    (
        4,
        "openxla/tokamax#887, #888/#889, #1016",
        "ragged_dot VJP: empty group reads iteration -1, 154 non-finite grads",
    ),
    (5, "pytorch/torchtitan#1166", "zero-token expert hangs torch grouped gemm"),
    (6, "NVIDIA/TransformerEngine#1527", "last group empty: pointer one past allocation"),
    (7, "NVIDIA/TransformerEngine#988", "zero-token expert + fp8_cast returns input: wgrad shape mismatch"),
    (8, "pytorch/pytorch#154557", "rows beyond offs[-1] uninitialised"),
    (9, "pytorch/pytorch#193633", "second backward NaN from stale tail of dX (0*NaN)"),
    (10, "pytorch/torchtitan#1237", "x longer than offsets[-1] -> inf loss"),
    (11, "huggingface/transformers#45621", "sentinel rows NaN kill routing-weight grads"),
    (
        12,
        "NVIDIA/TransformerEngine#3116, #2912",
        "NaN in padded slots leaks through wgrad sum; check `m==sum` relaxed to <=",
    ),
    (
        13,
        "NVIDIA/TransformerEngine#3484/#3485",
        "num_groups==1 shortcut: dense vs packed extent misindexes swizzled scales",
    ),
    (14, "AI-Hypercomputer/maxtext#4971", "stale-row amax=Inf poisons fp8 wgrad"),
    (15, "pytorch/torchtitan#2262 / pytorch/ao#3636", "group size 44 reaches MXFP8 kernel needing %32"),
    (
        16,
        "deepseek-ai/DeepGEMM#450 (open PR)",
        "labels finer than mk_alignment: whole tile uses first row's expert, silent",
    ),
    (17, "deepseek-ai/DeepGEMM#268", "masked kernel wrong for max_m<64 on H20"),
    (18, "deepseek-ai/DeepGEMM#103", "hang when skipped rows labelled -1"),
    (19, "deepseek-ai/DeepGEMM#178", "m=1 unaligned group stalls"),
    (20, "deepseek-ai/DeepGEMM#237, #405", "k-grouped illegal instruction at n=768 / m=768"),
    (21, "deepseek-ai/DeepGEMM#110", "wgrad IMA at (512,1024,147456)"),
    (22, "deepseek-ai/DeepGEMM#343", "SM90 k-grouped tensormap race (H200) hidden by tolerance"),
    (23, "deepseek-ai/DeepGEMM#301, #302", "JIT cache no cross-process lock"),
    (24, "AI-Hypercomputer/maxtext#1183", "megablox wrong when K % tile != 0"),
    (25, "ml-explore/mlx#3444", "wrong K-tail path for K=544.."),
    (26, "NVIDIA/TransformerEngine#2034", "roundup() int overflow, 398016x6144 grouped"),
    (27, "NVIDIA/TransformerEngine#2918", "multi_tensor sizes truncated to int32"),
    (28, "vllm-project/vllm#53390", "int32 token offset overflow in per-block quant"),
    (29, "bitsandbytes#1784, amd/Quark#43", "blockwise quant overflow at 2^30 / 2^31"),
    (30, "NVIDIA/TransformerEngine#3417", "TMA store/buffer reuse races in FP8/MXFP8/NVFP4/Hadamard kernels (open PR)"),
    (31, "NVIDIA/TransformerEngine#3474", "IMA in grouped MXFP8 quantise after rewrite"),
    (32, "NVIDIA/TransformerEngine#2695", "missing proxy fence in RHT amax"),
    (33, "flashinfer#3361, NVIDIA/TensorRT-LLM#14668", "PDL launch without fence: NaN in 373/400 iterations"),
    (34, "NVIDIA/TransformerEngine#1045", "multi-stream cuBLAS skips workspaces when a GEMM is empty"),
    (
        35,
        "NVIDIA/TransformerEngine#3171",
        "shared cuBLAS workspace (stale TMA descriptors) deadlocks on 2nd graph replay",
    ),
    (36, "NVIDIA/TransformerEngine#3038", "list m_splits = hidden H2D copy baked into graph"),
    (37, "NVIDIA/TransformerEngine#3051", "GroupedLinear drops skip_fp8_weight_update under graphs: stale weights"),
    (38, "NVIDIA/TransformerEngine#3234", "single_grouped_weight: no wgrad at all"),
    (39, "NVIDIA/TransformerEngine#3281", "NVFP4 SR returns all zeros on sm_120 (assert compiled out)"),
    (40, "AMD-AGI/Primus-Turbo#365", "SR seed always zero"),
    (41, "NVIDIA-NeMo/Megatron-Bridge#2172", "nvfp4 not deterministic with deterministic mode"),
    (42, "NVIDIA/TransformerEngine#24, Megatron-LM#7538", "recompute runs outside fp8 autocast (BF16 silently)"),
    (43, "NVIDIA-NeMo/Automodel#2635, #3156; pytorch/torchtitan#3336", "recompute re-routes, token counts differ by 1"),
    (
        44,
        "NVIDIA/TransformerEngine#1017, pytorch/ao#4470, Primus-Turbo#388",
        "non-contiguous input/grad wrong or crash",
    ),
    (45, "ROCm/TransformerEngine#623", "stride-0 broadcast grad read past end"),
    (46, "PrimeIntellect-ai/prime-rl#3567", "fake kernel strides != real -> compile assert"),
    (47, "NVIDIA/TransformerEngine#982, #123", "fp8 resume explodes; scale_inv not restored"),
    (48, "NVIDIA/TransformerEngine#231", "extra_state grows every step"),
    (49, "NVIDIA/TransformerEngine#2951", "MXFP8+FSDP2 resume crashes"),
    (50, "NVIDIA/Megatron-LM#6666", "BF16 round trip changes MXFP8 codes"),
    (51, "NVIDIA-NeMo/Automodel#2682", "fp8 expert weights silently not loaded (loss 15 vs 3)"),
    (52, "NVIDIA/TransformerEngine#2805, #1935, NeMo-RL#2003, verl#6953", "fp8 workspaces/transposes leak"),
    (53, "NVIDIA/cutile-python#51", "fp8 tensor refs leak per launch"),
    (
        54,
        "NVIDIA/TransformerEngine#431, AMD-AGI/Primus#669, NeMo-Automodel#1365",
        "amax/EP reductions mis-scoped or deadlock when ranks differ",
    ),
    (55, "vllm-project/vllm#43547", "zero-token rank skips collective -> deadlock"),
    (56, "vllm#37804/#38083, sglang#12878, vllm#31844", "FP32 scales silently re-rounded to E8M0: accuracy drop"),
    (57, "vllm-project/vllm#50332", "MoE path ignores the disable flag (silent backend choice)"),
    (58, "flashinfer#3103", "output strides ignored: experts overwrite each other"),
    (59, "flashinfer#1358, vllm#34824, PaddleFleet#1474", "scale transposed / wrong major-ness; hidden when K small"),
    (60, "pytorch/ao#4929", "scaled_mm needs swizzled scales; API changed in torch 2.12"),
    (61, "vllm#27917, #27915, #45496; vllm-xpu-kernels#571", "expert id -1 or out of range -> OOB write"),
    (62, "flashinfer#1469", "local_experts+offset > num_experts IMA"),
    (63, "AI-Hypercomputer/maxtext#4957, #5114", "fp8 MoE path crashes or qwix rewrites kernel body"),
    (64, "NVIDIA/TransformerEngine#2911/#2892", "padding distorts fp8 scale factors"),
    (65, "tgale96/grouped_gemm#1", "diverges at step 3 although fwd equal"),
)
"""Number, where it was seen, one line."""

_BEYOND: dict[int, str] = {
    23: "nothing is compiled at run time by Octavo itself; native kernels are built ahead of time",
    26: "needs more than 2^31 elements, so a GPU's memory: the native backends' own GPU tests",
    27: "needs more than 2^31 elements, so a GPU's memory: the native backends' own GPU tests",
    28: "needs more than 2^31 elements, so a GPU's memory: the native backends' own GPU tests",
    29: "needs more than 2^30 elements, so a GPU's memory: the native backends' own GPU tests",
    31: "needs compute-sanitizer on a GPU: the native backends' own GPU tests",
    42: "recomputation belongs to the front ends: tests of octavo-torch and octavo-jax",
    43: "routing and its recomputation belong to the model, not to a backend",
    45: "strides of gradients belong to the front ends: tests of octavo-torch",
    47: "saved state belongs to the front ends: tests of octavo-torch and octavo-jax",
    48: "saved state belongs to the front ends: tests of octavo-torch and octavo-jax",
    49: "sharded state belongs to the front ends: tests of octavo-torch and octavo-jax",
    50: "saved codes belong to the front ends: tests of octavo-torch and octavo-jax",
    51: "loading weights belongs to the front ends: tests of octavo-torch and octavo-jax",
    54: "needs several processes: distributed tests of the front ends",
    55: "needs several processes: distributed tests of the front ends",
    60: "a matter of framework versions: the `minimums` session of nox",
}
"""Rows that no test of the suite covers, and why."""

_NAMED = re.compile(r"\bfaults?(?:\.md)? (\d+(?:(?:, | and | to )\d+)*)")
_RANGE = re.compile(r"(\d+)(?: to (\d+))?")


Test = tuple[Path, str]
"""A file and a function of it."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One row: `tests` are ids without their case ("gemm::test_all_groups_empty"); `reason`: why there are none."""

    number: int
    where: str
    fault: str
    tests: tuple[str, ...]
    reason: str


def faults() -> tuple[Fault, ...]:
    """Every row, in order of its number."""
    covered = _covered()
    return tuple(Fault(n, where, line, covered.get(n, ()), _BEYOND.get(n, "")) for n, where, line in _KNOWN)


def markdown() -> str:
    """The table for the documentation."""
    lines = ["| # | where | fault | test, or why there is none |", "|---|---|---|---|"]
    for row in faults():
        answer = ", ".join(f"`{test}`" for test in row.tests) or row.reason
        lines.append(f"| {row.number} | {row.where} | {row.fault} | {answer} |")
    return "\n".join(lines) + "\n"


def numbers_in(docstring: str) -> tuple[int, ...]:
    """The rows that a docstring names: "(faults 8, 14)", "(fault 3)", "(faults.md 1 to 6 and 61)"."""
    numbers: list[int] = []
    for named in _NAMED.findall(" ".join(docstring.split())):
        for first, last in _RANGE.findall(named):
            numbers += range(int(first), int(last or first) + 1)
    return tuple(numbers)


def named_by_tests(files: Iterable[Path]) -> dict[int, tuple[Test, ...]]:
    """Row to the tests that name it in their docstrings; nothing is imported."""
    by_number: defaultdict[int, list[Test]] = defaultdict(list)
    for file in files:
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for number in numbers_in(ast.get_docstring(node) or ""):
                    by_number[number].append((file, node.name))
    return {number: tuple(dict.fromkeys(tests)) for number, tests in by_number.items()}


@cache
def _covered() -> dict[int, tuple[str, ...]]:
    """Row to tests of the suite."""
    files = sorted((Path(__file__).parent / "suite").rglob("test_*.py"))
    return {
        number: tuple(f"{file.stem.removeprefix('test_')}::{name}" for file, name in tests)
        for number, tests in named_by_tests(files).items()
    }
