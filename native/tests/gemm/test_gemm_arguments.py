"""Bad arguments of a Gemm: refused with a sentence, on both devices before anything runs, and nothing is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from guarded import aligned

import octavo_native as native
from octavo_native import gemms

ROWS, N, K, GROUPS = 40, 48, 32, 3
SIDES = {"rows": ROWS, "n": N, "k": K, "groups": GROUPS}
MORE = 4096
"""Elements that every array has beyond those of the call, for the calls that ask for more."""


class Call:
    """Arguments of calls that fit, for every kind of Gemm, and an output that `untouched` looks at."""

    def __init__(self) -> None:
        self.out = aligned(GROUPS * N * K + MORE, np.uint32)
        self.out[:] = 0xA5A5A5A5
        self.arrays = {
            "plan": aligned(native.plan_words(ROWS, GROUPS) + 4, np.int64),
            "left": aligned(ROWS * N + MORE, np.uint32),
            "right": aligned(GROUPS * N * K + MORE, np.uint32),
            "left_scales": aligned(MORE, np.float32),
            "right_scales": aligned(MORE, np.float32),
            "left_global": aligned(GROUPS + 4, np.float32),
            "right_global": aligned(GROUPS + 4, np.float32),
            "bias": aligned(GROUPS * N + 4, np.float32),
            "bias_scales": aligned(ROWS + 4, np.float32),
        }
        sizes = np.array([10, 0, 25], np.int32)
        plan = {"plan": self.at("plan"), "rows": ROWS, "groups": GROUPS}
        native.plan(cuda=False, sizes=sizes.ctypes.data, sizes_are_64=False, **plan)

    def at(self, name: str) -> int:
        """The array's address."""
        return int(self.arrays[name].ctypes.data)

    def arguments(self, spec: dict[str, Any]) -> dict[str, Any]:
        """A call that is served."""
        names = ["plan", "left", "right"]
        names += ["left_scales", "right_scales"] if spec.get("scaling") else []
        names += ["left_global", "right_global"] if spec.get("scaling") == "nvfp4" else []
        return {"cuda": False, **SIDES, "out": self.out.ctypes.data, **{name: self.at(name) for name in names}}

    def untouched(self) -> bool:
        return bool((self.out == 0xA5A5A5A5).all())


@pytest.fixture
def call() -> Call:
    return Call()


FPROP: dict[str, Any] = {"gemm": "fprop"}
WGRAD: dict[str, Any] = {"gemm": "wgrad"}
BLOCK: dict[str, Any] = {"gemm": "fprop", "scaling": "block"}
NVFP4: dict[str, Any] = {"gemm": "dgrad", "scaling": "nvfp4", "left_format": "e2m1", "right_format": "e2m1"}


@pytest.mark.parametrize("spec", [FPROP, WGRAD, BLOCK, NVFP4], ids=lambda spec: "-".join(spec.values()))
def test_the_calls_that_the_others_spoil_are_served(call: Call, spec: dict[str, Any]) -> None:
    """Products of zeros are zeros; the poison is gone from the result."""
    gemms.gemm_named(**spec).run(**call.arguments(spec))
    count = {"fprop": ROWS * N, "dgrad": ROWS * K, "wgrad": GROUPS * N * K}[spec["gemm"]]
    values = call.out.view(np.uint16)
    assert not values[:count].any()
    assert (values[count:] == 0xA5A5).all()


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({**FPROP, "accumulate": True}, "accumulate was given and the GEMM is not wgrad"),
        (
            {**FPROP, "right_square": True},
            "left_square, right_square, hadamard or fast_accumulation .* are not quantized",
        ),
        ({**WGRAD, "hadamard": True}, "right_square, hadamard or fast_accumulation .* are not quantized"),
        ({**FPROP, "fast_accumulation": True}, "right_square, hadamard or fast_accumulation .* are not quantized"),
        ({**BLOCK, "left_format": "e2m1"}, "a format and the scaling do not go together"),
        ({**BLOCK, "right_format": "e2m1"}, "a format and the scaling do not go together"),
        ({**NVFP4, "right_format": "e4m3"}, "a format and the scaling do not go together"),
        ({**BLOCK, "scaling": "mxfp8", "gemm": "wgrad", "right_square": True}, "x, which has square blocks with block"),
        ({**BLOCK, "left_square": True}, "left_square is for wgrad of x on the left"),
        ({**BLOCK, "gemm": "wgrad", "left_square": True, "right_square": True}, "left_square is for wgrad of x on"),
        ({**BLOCK, "scaling": "row", "right_square": True}, "right_square was given and the scaling has no blocks"),
        ({**NVFP4, "hadamard": True}, "hadamard was given and is for wgrad of nvfp4 alone"),
        ({**BLOCK, "gemm": "wgrad", "hadamard": True}, "hadamard was given and is for wgrad of nvfp4 alone"),
        ({**BLOCK, "fast_accumulation": True}, "fast_accumulation was given and the scaling has blocks"),
    ],
)
def test_names_that_do_not_go_together_are_refused(call: Call, spec: dict[str, Any], reason: str) -> None:
    """By every method, before an array is looked at."""
    gemm = gemms.gemm_named(**spec)
    with pytest.raises(ValueError, match=reason):
        gemm.run(**call.arguments(spec))
    for cuda in (False, True):
        with pytest.raises(ValueError, match=reason):
            gemm.workspace_bytes(cuda=cuda, **SIDES)
    with pytest.raises(ValueError, match=reason):
        gemm.tile(**SIDES)
    assert call.untouched()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rows": -1}, "rows is negative"),
        ({"rows": 2**62}, r"rows is past 2\^30"),
        ({"groups": 0}, "groups is less than 1"),
        ({"groups": 65537}, "groups is past 65536"),
        ({"n": 0}, "n or k is less than 1"),
        ({"k": -16}, "n or k is less than 1"),
        ({"k": 2**40}, r"k is past 2\^30"),
        ({"n": 2**30}, r"groups \* n is past 2\^30"),
        ({"tile": 1000}, "tile is not a tile number of this GEMM"),
        ({"tile": -2}, "tile is not a tile number of this GEMM"),
    ],
)
def test_sides_that_are_no_problem_are_refused(call: Call, changes: dict[str, Any], reason: str) -> None:
    """By `run` and by what sizes and models are asked from: a size computed from nonsense would be allocated."""
    gemm = gemms.gemm_named(**FPROP)
    with pytest.raises(ValueError, match=reason):
        gemm.run(**{**call.arguments(FPROP), **changes})
    for cuda in (False, True):
        with pytest.raises(ValueError, match=reason):
            gemm.workspace_bytes(cuda=cuda, **{**SIDES, **changes})
    with pytest.raises(ValueError, match=reason):
        gemm.tile(**{**SIDES, **changes})
    assert call.untouched()


@pytest.mark.parametrize(
    ("spec", "changes", "reason"),
    [
        (FPROP, {"plan": 0}, "plan is null and there are rows"),
        (FPROP, {"left": 0}, "left.data or right.data is null"),
        (WGRAD, {"right": 0}, "left.data or right.data is null"),
        (FPROP, {"out": 0}, "out is null"),
        (WGRAD, {"out": 0, "rows": 0}, "out is null"),
        (FPROP, {"left_scales": 256}, "an operand has scales and `quantized` is not set"),
        (FPROP, {"right_global": 256}, "an operand has scales and `quantized` is not set"),
        (BLOCK, {"right_scales": 0}, "a quantized operand has no scales"),
        (BLOCK, {"left_global": 256}, "global and scaling do not fit"),
        (NVFP4, {"right_global": 0}, "global and scaling do not fit"),
        (BLOCK, {"left_stride": K}, "quantized operands are laid out without strides"),
        (FPROP, {"left_stride": K - 1}, "left.row_stride or right.row_stride is less than the operand's columns"),
        (WGRAD, {"right_stride": -K}, "left.row_stride or right.row_stride is less than the operand's columns"),
        (FPROP, {"out_row_stride": N - 1}, "out_row_stride is less than the columns of `out`"),
        (FPROP, {"left_stride": 2**33}, r"a row stride is past 2\^32"),
        (FPROP, {"out_row_stride": 2**63 - 1}, r"a row stride is past 2\^32"),
        (WGRAD, {"out_group_stride": N * K - 1}, "out_group_stride is less than one weight gradient takes"),
        (WGRAD, {"out_group_stride": 2**62}, r"out_group_stride is past 2\^44"),
        (WGRAD, {"out_row_stride": K + 1, "out_group_stride": N * K}, "out_group_stride is less than one weight"),
        (FPROP, {"bias_scales": 256}, "bias_scales was given without a bias"),
        (WGRAD, {"bias": 256}, "bias was given and the GEMM is wgrad"),
        (FPROP, {"bias": 256, "bias_dtype": 3}, "bias_dtype is 3; it takes 0 to 2"),
        (FPROP, {"threads": -1}, "threads is negative"),
        (FPROP, {"ctas": -1}, "ctas is negative"),
    ],
)
def test_what_does_not_fit_is_a_value_error_with_the_reason(
    call: Call, spec: dict[str, Any], changes: dict[str, Any], reason: str
) -> None:
    """The native layer checks again what the Python edges have checked, and answers with an error, never an abort."""
    with pytest.raises(ValueError, match=reason):
        gemms.gemm_named(**spec).run(**{**call.arguments(spec), **changes})
    assert call.untouched()


@pytest.mark.parametrize(
    ("spec", "name", "by", "reason"),
    [
        (FPROP, "plan", 8, "plan is not aligned to 32 bytes"),
        (FPROP, "left", 1, "an operand is not aligned to its elements"),
        ({**FPROP, "dtype": "float32"}, "right", 2, "an operand is not aligned to its elements"),
        (FPROP, "out", 1, "out is not aligned to its elements"),
        ({**WGRAD, "out_dtype": "float32"}, "out", 2, "out is not aligned to its elements"),
        (BLOCK, "left_scales", 2, "an operand's scales are not aligned to 4 bytes"),
        (NVFP4, "left_global", 2, "an operand's global is not aligned to 4 bytes"),
        (FPROP, "bias", 1, "bias is not aligned to its elements"),
        (FPROP, "bias_scales", 2, "bias_scales is not aligned to 4 bytes"),
    ],
)
def test_misaligned_addresses_are_refused(call: Call, spec: dict[str, Any], name: str, by: int, reason: str) -> None:
    """Vector loads of the kernels would fault, on a GPU for the whole context."""
    arguments = call.arguments(spec)
    if name.startswith("bias"):
        arguments |= {"bias": call.at("bias"), "bias_scales": call.at("bias_scales")}
    arguments[name] += by
    with pytest.raises(ValueError, match=reason):
        gemms.gemm_named(**spec).run(**arguments)
    assert call.untouched()


@pytest.mark.parametrize(
    ("spec", "changes", "reason"),
    [
        (FPROP, {"n": 40}, "n or k is not a multiple of 16"),
        (BLOCK, {"k": 8}, "n or k is not a multiple of 16"),
        ({**FPROP, "dtype": "float32"}, {}, "dtype is f32 and the CUDA kernels multiply 16-bit operands"),
    ],
)
def test_what_the_cuda_kernels_do_not_take_is_told_without_them(
    spec: dict[str, Any], changes: dict[str, int], reason: str
) -> None:
    """A plugin asks before there is a tensor, in builds without CUDA too; the CPU serves the same problem."""
    gemm = gemms.gemm_named(**spec)
    sides = {**SIDES, **changes}
    assert gemm.workspace_bytes(cuda=False, **sides) >= 0
    with pytest.raises(ValueError, match=reason):
        gemm.workspace_bytes(cuda=True, **sides)
    with pytest.raises(ValueError, match=reason):
        gemm.tile(**sides)


@pytest.mark.skipif(not native.HAS_CUDA, reason="a build for the CPU refuses cuda=True before it looks at addresses")
@pytest.mark.parametrize(
    ("spec", "changes", "reason"),
    [
        (FPROP, {"left": 256 + 8}, "an operand is not aligned to 16 bytes, as the CUDA kernels need"),
        (BLOCK, {"right": 256 + 8}, "an operand is not aligned to 16 bytes, as the CUDA kernels need"),
        (BLOCK, {"left_scales": 256 + 4}, "block scales are not aligned to 16 bytes, as the CUDA kernels need"),
        (FPROP, {"left_stride": K + 1}, "an operand's row_stride is not a multiple of 16 bytes"),
        (FPROP, {"out": 256 + 8}, "out is not aligned to 16 bytes, as the CUDA kernels need"),
        (FPROP, {"out_row_stride": N + 4}, "a stride of out is not a multiple of 16 bytes"),
        (WGRAD, {"out_group_stride": N * K + 4}, "a stride of out is not a multiple of 16 bytes"),
        (NVFP4, {"workspace": 256, "workspace_bytes": 0}, "workspace"),
        (NVFP4, {"workspace": 256 + 128, "workspace_bytes": 2**30}, "workspace"),
    ],
)
def test_the_cuda_calls_refuse_before_they_launch(
    call: Call, spec: dict[str, Any], changes: dict[str, Any], reason: str
) -> None:
    """Host checks: no device is needed to be refused."""
    with pytest.raises(ValueError, match=reason):
        gemms.gemm_named(**spec).run(**{**call.arguments(spec), "cuda": True, **changes})
    assert call.untouched()


@pytest.mark.skipif(native.HAS_CUDA, reason="this build has CUDA kernels, so cuda=True is no mistake")
def test_a_build_for_the_cpu_says_so(call: Call) -> None:
    """cuda=True is answered with why, and with the command that changes it."""
    with pytest.raises(ValueError, match=r"this build has no CUDA kernels: nvcc was not found .* pip install"):
        gemms.gemm_named(**FPROP).run(**{**call.arguments(FPROP), "cuda": True})
    assert call.untouched()


@pytest.mark.parametrize("name", ["plan", "left", "out", "bias", "workspace"])
@pytest.mark.parametrize("value", [1.5, "64", None, b"", np.float32(2), -1, 2**64])
def test_an_address_is_an_integer_of_64_bits(call: Call, name: str, value: Any) -> None:
    """A float, a string or None in an address's place is a TypeError, and no number is read from it."""
    with pytest.raises(TypeError, match="incompatible function arguments"):
        gemms.gemm_named(**FPROP).run(**{**call.arguments(FPROP), name: value})
    assert call.untouched()


@pytest.mark.parametrize("missing", ["cuda", "rows", "n", "k", "groups", "plan", "left", "right", "out"])
def test_what_has_no_default_must_be_given(call: Call, missing: str) -> None:
    arguments = call.arguments(FPROP)
    del arguments[missing]
    with pytest.raises(TypeError):
        gemms.gemm_named(**FPROP).run(**arguments)
    assert call.untouched()


def test_unknown_and_positional_arguments_are_refused(call: Call) -> None:
    """Two dozen integers in a row would be a trap: every argument has its name."""
    gemm, arguments = gemms.gemm_named(**FPROP), call.arguments(FPROP)
    with pytest.raises(TypeError):
        gemm.run(**arguments, colour=3)
    with pytest.raises(TypeError):
        gemm.run(*arguments.values())  # type: ignore[misc]
    assert call.untouched()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"gemm": 3}, "gemm is 3; it takes 0 to 2"),
        ({"gemm": -1}, "gemm is -1; it takes 0 to 2"),
        ({"dtype": 3}, "dtype is 3; it takes 0 to 2"),
        ({"out_dtype": 7}, "out_dtype is 7; it takes 0 to 2"),
        ({"scaling": 6}, "scaling is 6; it takes 0 to 5"),
        ({"left_format": 3}, "left_format is 3; it takes 0 to 2"),
        ({"right_format": -2}, "right_format is -2; it takes 0 to 2"),
    ],
)
def test_a_gemm_of_unknown_numbers_is_refused(fields: dict[str, int], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        native.Gemm(**{"gemm": 0, "quantized": True, **fields})


@pytest.mark.parametrize("name", ["gemm", "dtype", "scaling", "left_format", "right_format", "out_dtype"])
def test_a_gemm_of_unknown_names_is_refused(name: str) -> None:
    """The sentence has the name that was given and those that there are."""
    with pytest.raises(ValueError, match=rf"{name} is 'other'; it is one of \w+, "):
        gemms.gemm_named(**{"gemm": "fprop", name: "other"})


def test_a_model_of_no_device_is_refused() -> None:
    with pytest.raises(ValueError, match="sms is less than 1"):
        gemms.gemm_named(**FPROP).tile(**SIDES, sms=0)


@pytest.mark.skipif(not native.HAS_CUDA or Path("/dev/nvidiactl").exists(), reason="no CUDA kernels, or a GPU for them")
def test_a_machine_without_a_gpu_says_so(call: Call) -> None:
    """The multiprocessors of no device are 0, which the choice of a tile must not divide by."""
    aligned_to_pieces = {name: value for name, value in call.arguments(FPROP).items() if name != "threads"}
    with pytest.raises(RuntimeError, match="CUDA"):
        gemms.gemm_named(**FPROP).run(**{**aligned_to_pieces, "cuda": True})
    assert call.untouched()


@pytest.mark.parametrize(
    ("spec", "changes", "reason"),
    [
        ({**BLOCK, "gemm": "wgrad"}, {"left_index": "plan"}, "codes that depend on other rows"),
        ({**BLOCK, "scaling": "delayed"}, {"left_index": "plan"}, "codes that depend on other rows"),
        (BLOCK, {"right_index": "plan"}, "the right operand has an index and is a weight"),
        (BLOCK, {"left_index": "plan", "cuda": True}, "gather e4m3 beside e4m3 weights in square blocks"),
        (
            {**BLOCK, "right_square": True, "left_format": "e5m2"},
            {"left_index": "plan", "cuda": True},
            "gather e4m3 beside e4m3 weights in square blocks",
        ),
        (FPROP, {"right_index": "plan"}, "the right operand has an index and is a weight"),
        (WGRAD, {"left_index": "plan", "right_index": "plan"}, "both operands have an index"),
        (FPROP, {"left_index": "plan", "count": -1}, "count is negative"),
        (FPROP, {"left_index": "plan", "each": 0}, "each is less than 1"),
        (FPROP, {"left_index": "plan", "each": 2, "count": 1 << 30}, "count \\* each is past 2\\^30"),
        ({**FPROP, "dtype": "float16"}, {"left_index": "plan", "cuda": True}, "dtype is not bf16"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_indices_that_do_not_fit(call: Call, spec: dict[str, Any], changes: dict[str, Any], reason: str) -> None:
    """Refused with a sentence, and nothing is written."""
    arguments = {name: call.at(value) if isinstance(value, str) else value for name, value in changes.items()}
    if arguments.get("cuda") and not native.HAS_CUDA:
        pytest.skip("built without CUDA")
    with pytest.raises(ValueError, match=reason):
        gemms.gemm_named(**spec).run(**call.arguments(spec) | {"count": 20} | arguments)
    assert call.untouched()
