"""One layer on a mesh and the same blocks one by one on one device: inputs, both runs, and how they are compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import octavo
import octavo_jax
import octavo_numerics
from octavo_jax import MeshAxes
from octavo_jax.sharding import specs
from octavo_jax.sharding.placement import Placement

ROWS = 40
"""M of a block: no other dimension has this length, so that a collective on tokens shows."""

GROUPS = 2
SEED = 9


@dataclass(frozen=True)
class Case:
    """A recipe on a mesh. `mesh` as `mesh_of` takes it; `blocks` are B; `weight` "kn" or "nk"."""

    recipe: str
    mesh: Mapping[str, int]
    blocks: tuple[int, ...]
    axes: MeshAxes
    weight: str = "kn"
    k: int = 256
    n: int = 256
    backend: str = "jax-reference"

    def __str__(self) -> str:
        lengths = "x".join(f"{name}{size}" for name, size in self.mesh.items())
        return f"{self.recipe}-{lengths}-{self.weight}{'' if self.axes.tp is None else self.axes.tp_dim}"

    @property
    def placement(self) -> Placement:
        """Of the arrays, before any mesh is in scope: it names axes."""
        return Placement(self.axes, None, self.blocks)

    @property
    def experts(self) -> int:
        return self.placement.block_count("e")

    @property
    def shape(self) -> tuple[int, int, int]:
        sides = (self.k, self.n) if self.weight == "kn" else (self.n, self.k)
        return (self.experts * GROUPS, *sides)


@dataclass(frozen=True)
class Inputs:
    """Of a layer's forward and backward pass; rows past the sums of x and dy are NaN."""

    x: Any
    kernel: Any
    bias: Any
    sizes: Any
    dy: Any
    scales: tuple[Any, ...] = field(default=())

    @property
    def arrays(self) -> tuple[Any, ...]:
        return self.x, self.kernel, self.bias, self.sizes, self.dy, self.scales


def inputs(case: Case, rng: np.random.Generator) -> Inputs:
    """Random ones: groups of 0 to M / G rows, a kernel and a bias of float32, so that gradients are not rounded."""
    sizes = rng.integers(0, ROWS // GROUPS + 1, (*case.blocks, GROUPS)).astype(np.int32)
    sizes.reshape(-1, GROUPS)[0] = (0, 1)
    x, dy = (_tokens(rng, case, width, sizes) for width in (case.k, case.n))
    kernel = rng.standard_normal(case.shape).astype(np.float32)
    bias = rng.standard_normal((case.shape[0], case.n)).astype(np.float32)
    scales = tuple((2.0 ** rng.integers(2, 7, case.shape[0])).astype(np.float32) for _ in range(3))
    return Inputs(x, kernel, bias, sizes, dy, scales)


def _tokens(rng: np.random.Generator, case: Case, width: int, sizes: np.ndarray) -> Any:
    rows = rng.standard_normal((*case.blocks, ROWS, width)).astype(np.float32)
    rows[np.arange(ROWS) >= sizes.sum(-1)[..., None]] = np.nan
    return rows.astype(jnp.bfloat16)


def run(case: Case, sharding: MeshAxes | None, offset: Any, *arrays: Any) -> Any:
    """(y, dx, dw, db, state's amaxes), as a function of arrays alone when `case` and `sharding` are bound."""
    x, kernel, bias, sizes, dy, scales = arrays
    recipe, state = octavo.recipe(case.recipe), None
    if recipe.stateful:
        recipe = octavo.DelayedScaling(history=4)
        histories = (octavo_jax.ScalingHistory(jnp.zeros((4, len(s)), jnp.float32), s) for s in scales)
        state = octavo_jax.DelayedState(*histories)

    def layer(x: Any, kernel: Any, bias: Any, state: Any) -> Any:
        made = octavo_jax.grouped_dense(
            x,
            kernel,
            sizes,
            recipe=recipe,
            bias=bias,
            seed=SEED if recipe.stochastic else None,
            state=state,
            group_offset=offset,
            contracting_dims=((-1,), (1 if case.weight == "kn" else 2,)),
            preferred_element_type=jnp.bfloat16,
            sharding=sharding,
            backend=case.backend,
        )
        return made if state is not None else (made, None)

    (y, later), pull = jax.vjp(layer, x, kernel, bias, state)
    dx, dw, db, state = pull((dy, later))
    return y, dx, dw, db, None if state is None else tuple(h.history[0] for h in (state.x, state.kernel, state.grad))


@lru_cache(maxsize=16)
def _one_block(recipe: str, weight: str, k: int, n: int, backend: str) -> Any:
    return jax.jit(partial(run, Case(recipe, {}, (), MeshAxes(), weight, k, n, backend), None))


def one_by_one(case: Case, given: Inputs) -> list[np.ndarray]:
    """(y, dx, dw, db, amaxes) as one device computes them block by block; sums over data blocks in float32."""
    parts: dict[int, list[Any]] = {e: [] for e in range(case.experts)}
    ys, dxs = [], []
    positions = list(np.ndindex(*case.blocks))
    letters = case.placement.block_letters
    for position in positions:
        at = dict(zip(letters, position, strict=True))
        e, f = at.get("e", 0), at.get("f", 0)
        here = slice(e * GROUPS, (e + 1) * GROUPS)
        scales = tuple(s[here] for s in given.scales)
        offset = jnp.uint32((f * case.experts + e) * GROUPS)
        arrays = given.x[position], given.kernel[here], given.bias[here], given.sizes[position], given.dy[position]
        layer = _one_block(case.recipe, case.weight, case.k, case.n, case.backend)
        y, dx, *others = layer(offset, *arrays, scales)
        ys.append(np.asarray(y))
        dxs.append(np.asarray(dx))
        parts[e].append(jax.tree.map(np.asarray, others))
    dw, db = (np.concatenate([sum(p[i] for p in parts[e]) for e in parts]) for i in (0, 1))
    results = [np.stack(ys).reshape(*case.blocks, ROWS, case.n), np.stack(dxs).reshape(*case.blocks, ROWS, case.k)]
    amaxes = []
    if parts[0][0][2] is not None:
        amaxes = [np.concatenate([np.max([p[2][i] for p in parts[e]], axis=0) for e in parts]) for i in range(3)]
    return [*results, dw, db, *amaxes]


def shardings(case: Case) -> tuple[Any, ...]:
    """PartitionSpecs of a case's arrays, over axes."""

    def axes(spec: Any) -> Any:
        entries = [() if e is None else (e,) if isinstance(e, str) else e for e in spec]
        return jax.sharding.PartitionSpec(*(sum(map(case.placement.axes_of, names), ()) or None for names in entries))

    p = case.placement
    weight: Any = case.weight
    found = (
        specs.rows(p, "i"),
        specs.kernel(p, weight),
        specs.groups(p, columns="o"),
        specs.sizes(p),
        specs.rows(p, "o"),
    )
    return tuple(map(axes, found))


def assert_same(case: Case, given: Inputs, got: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    """Equal bits, or sums in another order: then y and dx are within the bound of float64 products of what was
    quantized, and sums over data blocks within the rounding of their additions."""
    blocks = int(np.prod(case.blocks)) // case.experts
    for name, a, b in zip(("y", "dx", "dw", "db", "amax x", "amax kernel", "amax dy"), got, wanted, strict=False):
        a, b = np.asarray(a), np.asarray(b)
        assert a.shape == b.shape, name
        if np.array_equal(a, b):
            continue
        assert not name.startswith("amax"), name
        if name in ("y", "dx"):
            _assert_within(case, given, name, a)
            continue
        # float32 additions in another order: of blocks, and of the rows of a group in another panel's place
        allowed = 2.0**-23 * (blocks + ROWS) * _magnitude(given, name, case)
        assert np.all(np.abs(a - b) <= allowed), name


def _magnitude(given: Inputs, name: str, case: Case) -> Any:
    rows = np.abs(np.nan_to_num(given.dy.astype(np.float64))).max()
    width = np.abs(np.nan_to_num(given.x.astype(np.float64))).max() if name == "dw" else 1.0
    return rows * width * ROWS * np.prod(case.blocks)


def _assert_within(case: Case, given: Inputs, name: str, got: np.ndarray) -> None:
    recipe = octavo.recipe(case.recipe)
    gemm: Any = "fprop" if name == "y" else "dgrad"
    letters = case.placement.block_letters
    w = given.kernel if case.weight == "nk" else np.swapaxes(given.kernel, 1, 2)
    plane: Any = "rowwise" if gemm == "fprop" else "columnwise"
    matrices = _values(recipe, "w", gemm, plane, w, None, given.scales[1], 0)
    products = case.k + 1 if gemm == "fprop" else case.n  # a bias is one more product of a sum
    bound = octavo_numerics.error_bound(recipe, products, gemm=gemm)
    for position in np.ndindex(*case.blocks):
        at = dict(zip(letters, position, strict=True))
        e, f = at.get("e", 0), at.get("f", 0)
        sizes, here = given.sizes[position], slice(e * GROUPS, (e + 1) * GROUPS)
        operand: Any = "x" if gemm == "fprop" else "dy"
        rows = (given.x if gemm == "fprop" else given.dy)[position]
        scale = given.scales[0 if gemm == "fprop" else 2][here]
        values = _values(recipe, operand, gemm, "rowwise", rows, sizes, scale, (f * case.experts + e) * GROUPS)
        ends = np.cumsum(sizes)
        assert not got[position][ends[-1] :].any(), name
        for group, (end, size) in enumerate(zip(ends, sizes, strict=True)):
            left, right = values[end - size : end], matrices[e * GROUPS + group]
            if not size:
                continue
            right = right if gemm == "fprop" else right.T
            if gemm == "fprop":
                bias = given.bias[e * GROUPS + group].astype(np.float64)
                left, right = np.c_[left, np.ones(size)], np.c_[right, bias]
            report = bound.check(got[position][end - size : end], left, right, zero_mean=False)
            assert report.passed, f"{name} {position}: {report.describe()}"


def _values(
    recipe: Any, operand: Any, gemm: Any, plane: Any, array: Any, sizes: Any, scale: Any, offset: int
) -> np.ndarray:
    spec = recipe.quantizer(operand) if recipe.quantizes(gemm) else None
    if spec is None:
        return array.astype(np.float64)  # type: ignore[no-any-return]
    how = {"seed": SEED if spec.stochastic else None, "scale": scale if recipe.stateful else None}
    q = octavo_numerics.quantize(array, spec, sizes, group_offset=offset, **how)
    return octavo_numerics.dequantize(q, plane).astype(np.float64)
