"""What support.py says of the kernels, compared with the kernels."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from router_calls import choose

import octavo_native
from octavo_native import gemms, layouts, support
from octavo_numerics import RouterRule

SOURCE = Path(octavo_native.__file__).parent


def test_a_card_can_be_built_without_the_compiled_module(tmp_path: Path) -> None:
    """Listing backends must not load kernels, and must work where they are missing."""
    package = tmp_path / "octavo_native"
    package.mkdir()
    for file in SOURCE.glob("*.py"):
        shutil.copy(file, package)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import octavo_native; "
        "from octavo_native import gathering, layouts, support; "
        "assert octavo_native.__file__.startswith(sys.argv[1]); assert support.SUPPORT; "
        "print(layouts.plan_words(96, 3)); sys.exit('octavo_native._native' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) == octavo_native.plan_words(96, 3)


def test_an_unknown_name_of_the_package_is_an_attribute_error() -> None:
    """The package is lazy: a typing error must not become an ImportError or None."""
    with pytest.raises(AttributeError, match="no attribute 'Quantiser'"):
        _ = octavo_native.Quantiser  # type: ignore[attr-defined]
    assert set(octavo_native.__all__) <= set(dir(octavo_native))


@pytest.mark.parametrize("name", octavo_native.__all__)
def test_every_name_can_be_the_first_that_is_used(name: str) -> None:
    """Each in a process of its own: a name must not rely on another one that has been used before."""
    use = "octavo_native.place(2, 48)" if name == "place" else f"octavo_native.{name}"
    code = f"import octavo_native; value = {use}; assert value is not None"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def _refusal_of_the_kernels(op: str, cuda: bool, **changed: object) -> str | None:
    arguments = {"k": 64, "n": 64, "dtype": "bfloat16", **changed}
    gemm = gemms.gemm_named(gemm=op, dtype=str(arguments["dtype"]))
    try:
        gemm.workspace_bytes(cuda=cuda, rows=1, n=int(str(arguments["n"])), k=int(str(arguments["k"])), groups=1)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize("op", sorted(support.GEMM_OPS))
def test_sides_are_refused_where_the_kernels_refuse_them(op: str, cuda: bool) -> None:
    """check_gemm.cpp refuses sides when a call is made; a plan must know before."""
    for side in range(-1, 50):
        for sides in ({"k": side}, {"n": side}):
            refused = support.gemm_refusal(op, cuda=cuda, **sides)
            assert (refused is None) == (_refusal_of_the_kernels(op, cuda, **sides) is None), (sides, refused)


@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize("dtype", sorted(octavo_native.DTYPES))
def test_dtypes_are_refused_where_the_kernels_refuse_them(dtype: str, cuda: bool) -> None:
    refused = support.gemm_refusal("fprop", cuda=cuda, dtypes=(dtype, dtype))
    assert (refused is None) == (_refusal_of_the_kernels("fprop", cuda, dtype=dtype) is None)


@pytest.mark.parametrize(
    ("op", "arguments", "sentence"),
    [
        (
            "fprop",
            {"k": 40},
            "k is 40, and its cuda GEMMs take multiples of 16; pad the weights, or choose another backend",
        ),
        (
            "dgrad",
            {"k": 45, "n": 77},
            "k is 45 and n is 77, and its cuda GEMMs take multiples of 16; pad the weights, or choose another backend",
        ),
        ("wgrad", {"n": 0, "cuda": False}, "n is 0, and its cpu GEMMs take a side of 1 or more"),
        (
            "fprop",
            {"dtypes": ("bfloat16", "float32")},
            "x is bfloat16 and w float32; its cuda GEMMs multiply unquantized operands of one dtype",
        ),
        (
            "dgrad",
            {"dtypes": ("bfloat16", "float16")},
            "dy is bfloat16 and w float16; its cuda GEMMs multiply unquantized operands of one dtype",
        ),
        (
            "wgrad",
            {"dtypes": ("float32", "float16")},
            "x is float32 and dy float16; its cuda GEMMs multiply unquantized operands of one dtype",
        ),
        (
            "wgrad",
            {"dtypes": ("float32", None)},
            "the unquantized operands are float32; its cuda GEMMs multiply bfloat16 or float16, so cast them or "
            "quantize them",
        ),
    ],
)
def test_a_refusal_names_what_was_given_and_what_is_needed(
    op: str, arguments: dict[str, object], sentence: str
) -> None:
    """Both plugins show these sentences in `octavo why` and in NoBackendError."""
    assert support.gemm_refusal(op, **{"cuda": True, **arguments}) == sentence  # type: ignore[arg-type]


@pytest.mark.parametrize(("experts", "choices", "groups"), [(1024, 32, 32), (1025, 1, 1), (1024, 33, 1), (1024, 1, 64)])
def test_routers_are_refused_where_the_kernels_refuse_them(experts: int, choices: int, groups: int) -> None:
    """check_router.cpp refuses what a warp does not hold; a plan must know before."""
    refused = support.router_refusal(experts, choices, groups)
    rule = RouterRule(choices, groups=groups, kept_groups=max(1, groups // 2))
    if refused is None:
        choose("cpu", np.zeros((1, experts), np.float32), rule)
    else:
        with pytest.raises(ValueError, match="the most that a warp holds"):
            choose("cpu", np.zeros((1, experts), np.float32), rule)


def test_operands_of_two_dtypes_are_fine_where_they_are_quantized_or_on_the_cpu() -> None:
    assert support.gemm_refusal("fprop", cuda=True, k=64, n=64) is None
    assert support.gemm_refusal("fprop", cuda=False, k=63, n=1, dtypes=("float32", "bfloat16")) is None


def test_layouts_are_those_that_have_shapes() -> None:
    """layout_refusal admits exactly the layouts of which layouts.codes_shape knows a shape."""
    size = {"format": "e4m3", "scaling": "row", "rows": 32, "cols": 32, "groups": 2}
    names = (layouts.PLAIN, layouts.NATIVE_ROWS, layouts.NATIVE_COLUMNS, "columns")
    for rowwise in names:
        refused = support.layout_refusal(("rowwise",), (rowwise, "anything"))
        try:
            layouts.codes_shape(**size, layout=rowwise, direction="rowwise")  # type: ignore[arg-type]
        except ValueError:
            assert refused == f"produces rowwise data in layouts plain or rows; {rowwise} was requested"
        else:
            assert refused is None
    refused = support.layout_refusal(("rowwise", "columnwise"), ("rows", "rows"))
    assert refused == "produces columnwise data in layouts plain or panels; rows was requested"


def test_a_build_without_cuda_says_how_to_get_one_with_it() -> None:
    assert support.build_refusal(cuda=False, has_cuda=False) is None
    assert support.build_refusal(cuda=True, has_cuda=True) is None
    sentence = support.build_refusal(cuda=True, has_cuda=False) or ""
    assert sentence.startswith("this octavo-native was built without CUDA kernels; install a build with them")
    assert "octavo doctor" in sentence


def test_another_abi_level_names_both_levels_and_the_caller() -> None:
    assert support.abi_refusal(1, "octavo-torch-native", 1) is None
    assert support.abi_refusal(2, "octavo-jax-native", 1) == (
        "octavo-native has ABI level 2 and octavo-jax-native calls level 1; "
        "install releases of both that belong together"
    )


def test_the_table_names_what_the_module_has() -> None:
    """Every scaling has a row for each kind of operation on each device, and no row names another recipe."""
    assert set(octavo_native.GEMMS) == support.GEMM_OPS
    assert set(octavo_native.SCORES) == {"softmax", "sigmoid", "sqrtsoftplus"}
    assert set(octavo_native.ACTIVATIONS) == support.ACTIVATIONS
    assert set(octavo_native.SCALINGS) == support.QUANTIZED_RECIPES
    for rows in support.SUPPORT.values():
        for ops in (support.QUANTIZE_OPS, support.GEMM_OPS):
            served = [recipe for row in rows if row.ops == ops for recipe in row.recipes if recipe != "high_precision"]
            assert sorted(served) == sorted(octavo_native.SCALINGS)
    in_dtypes = {dtype for row in support.SUPPORT["cuda"] for dtype in row.in_dtypes or ()}
    assert in_dtypes == set(support.CUDA_DTYPES) <= set(octavo_native.DTYPES)
