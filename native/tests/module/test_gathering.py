"""octavo_native.gathering: where rows are read from tokens."""

from __future__ import annotations

from typing import Any

from octavo_native import gathering, support

HALVES = (("bfloat16", "float16"), ("float16", "float16"), ("float32", "float32"))


def test_rows_are_gathered_where_that_was_faster() -> None:
    """On a CPU all that the kernels gather; on CUDA bf16, but not beside a wide operand of a weight gradient, and codes
    of E4M3 beside square blocks, where the product is narrow (decisions 69 and 83)."""

    def values(op: str, cuda: bool, columns: int | None, *dtypes: str) -> bool:
        first, second = dtypes or ("bfloat16", "bfloat16")
        return gathering.gathers_values(op, cuda=cuda, dtypes=(first, second), other_columns=columns)

    assert all(values(op, False, 1 << 20, "float32", "float16") for op in support.GEMM_OPS)
    assert [values(op, True, 2576) for op in ("fprop", "dgrad", "wgrad")] == [True, True, False]
    assert values("wgrad", True, 2560)
    assert values("wgrad", True, None)
    assert not any(values(op, True, 16, *dtypes) for op in support.GEMM_OPS for dtypes in HALVES)

    def codes(op: str, operand: str, cuda: bool, columns: int | None, scaling: str = "block", **how: Any) -> bool:
        how = {"formats": ("e4m3", "e4m3"), "square": True, "alone": False, **how}
        return gathering.gathers_codes(op, operand, cuda=cuda, scaling=scaling, columns=columns, **how)

    assert codes("fprop", "x", False, 1 << 20, formats=("e5m2", "e4m3"), square=False)
    for alone, of_x, of_dy in ((False, 3072, 640), (True, 3072, 2048)):
        for op, operand, most in (("fprop", "x", of_x), ("dgrad", "dy", of_dy)):
            limits = [codes(op, operand, True, columns, alone=alone) for columns in (None, most, most + 16)]
            assert limits == [True, True, False], (operand, alone)
    assert not codes("dgrad", "dy", True, 640, formats=("e5m2", "e4m3"))
    assert not codes("fprop", "x", True, 640, square=False)
    assert not codes("wgrad", "x", False, 16)
    assert not any(codes("fprop", "x", cuda, 16, "row") for cuda in (False, True))
