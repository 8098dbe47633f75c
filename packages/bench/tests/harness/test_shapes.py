"""Shapes of `octavo bench gemm`, `step` and `tiles`, and their group sizes."""

from __future__ import annotations

import pytest

from octavo_bench.errors import InputError
from octavo_bench.harness.shapes import DEEPGEMM, MODELS, SIZES, Shape, parse_shapes, sizes_of


def test_a_shape_is_groups_in_out_rows() -> None:
    """G,K,N,M in this order; x works between them, too."""
    (shape,) = parse_shapes(["8,4096,28672,16384"])
    assert shape.key == MODELS[0].key
    assert shape.flops == 2 * 4096 * 28672 * 16384
    assert shape.tflops(1e6) == pytest.approx(3.848, abs=1e-3)
    assert parse_shapes(["2x64x32x16"])[0].key == (2, 64, 32, 16)
    assert parse_shapes([]) == ()
    with pytest.raises(InputError, match="M 1 to"):
        parse_shapes(["2,64,64,0"])


@pytest.mark.parametrize("shape", [*MODELS, *DEEPGEMM, Shape("one", 1, 64, 64, 100)], ids=lambda shape: str(shape.key))
def test_sizes_fill_the_rows(shape: Shape, seed: int) -> None:
    """Even ones differ by a row at most; skewed ones have an empty group and come back from their seed."""
    for name in SIZES:
        sizes = sizes_of(shape, name, seed)
        assert (len(sizes), sum(sizes)) == (shape.groups, shape.rows)
        assert sizes == sizes_of(shape, name, seed)
        if name == "even" or shape.groups == 1:
            assert max(sizes) - min(sizes) <= 1
        else:
            assert min(sizes) == 0
