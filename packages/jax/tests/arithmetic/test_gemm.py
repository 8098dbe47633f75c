"""The reference's fp32 products: which way round a weight lies in memory is no part of a sum."""

from __future__ import annotations

import jax
import numpy as np

from octavo_jax.arithmetic import gemm

M, K, N, G = 96, 256, 48, 2


def test_a_product_has_the_bits_of_its_transposed_weight(rng: np.random.Generator) -> None:
    """Weights [G, N, K] and [G, K, N] of the same values give the same bits, though XLA:CPU adds up products in
    another order for each: a layer is the same in either orientation, alone and over a mesh."""
    a = rng.standard_normal((M, K)).astype(np.float32)
    w = rng.standard_normal((G, N, K)).astype(np.float32)
    sizes = rng.multinomial(M - 5, [1 / G] * G).astype(np.int32)
    product = jax.jit(gemm.rows_times_matrices, static_argnames="contract")
    along_last = product(a, w, sizes, contract=2)
    along_middle = product(a, np.ascontiguousarray(w.swapaxes(1, 2)), sizes, contract=1)
    assert np.array_equal(along_last, along_middle)


def test_a_weight_gradient_has_the_bits_of_its_transpose(rng: np.random.Generator) -> None:
    """[G, N, K] and [G, K, N] are one gradient, as the weights are."""
    x, dy = (rng.standard_normal((M, columns)).astype(np.float32) for columns in (K, N))
    sizes = rng.multinomial(M - 5, [1 / G] * G).astype(np.int32)
    gradient = jax.jit(gemm.matrices_from_rows)
    assert np.array_equal(gradient(x, dy, sizes), gradient(dy, x, sizes).swapaxes(1, 2))
