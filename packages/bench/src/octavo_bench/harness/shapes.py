"""The shapes of GEMMs that are timed: expert layers of published models, or the user's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from octavo_bench.errors import InputError

OWN = "your shape"
SIZES = ("even", "skewed")


@dataclass(frozen=True, slots=True)
class Shape:
    """A grouped linear layer: G experts of [N, K] weights, M rows of K features in all."""

    name: str
    groups: int
    k: int
    n: int
    rows: int

    @property
    def key(self) -> tuple[int, int, int, int]:
        """(G, K, N, M)."""
        return self.groups, self.k, self.n, self.rows

    @property
    def text(self) -> str:
        """As options and goals files write it."""
        return ",".join(map(str, self.key))

    @property
    def label(self) -> str:
        """Such as `Mixtral fc1 (8, 4096, 28672, 16384)`."""
        return f"{self.name} {self.key}"

    @property
    def flops(self) -> int:
        """Of one of its three GEMMs."""
        return 2 * self.rows * self.n * self.k

    def tflops(self, microseconds: float) -> float:
        """The rate of one GEMM that takes this long."""
        return self.flops / microseconds / 1e6


MODELS: tuple[Shape, ...] = (
    Shape("Mixtral fc1", 8, 4096, 28672, 16384),
    Shape("DSv3 fc1", 32, 7168, 4096, 32768),
    Shape("DSv3 fc2", 32, 2048, 7168, 32768),
    Shape("Qwen3-235B fc1", 16, 4096, 3072, 32768),
    Shape("gpt-oss-120b fc1", 32, 2880, 5760, 32768),
    Shape("Qwen3-30B fc1", 128, 2048, 1536, 65536),
)
"""One expert-parallel rank of each model."""

DEEPGEMM: tuple[Shape, ...] = (
    Shape("DSv3 fc1, 8 experts", 8, 7168, 4096, 8192),
    Shape("DSv3 fc2, 8 experts", 8, 2048, 7168, 8192),
    Shape("Qwen3-235B fc1, half", 16, 4096, 3072, 16384),
    Shape("Mixtral fc1", 8, 4096, 28672, 16384),
    Shape("gpt-oss fc1, 16 experts", 16, 2880, 5760, 16384),
    Shape("Llama-4 Maverick fc1", 8, 5120, 16384, 16384),
)
"""Those that DeepGEMM's authors publish figures for, and their like."""

SMALL: tuple[Shape, ...] = (Shape("small", 4, 256, 384, 512),)
"""The default on a CPU."""

EXPERTS: tuple[Shape, ...] = (
    Shape("Mixtral", 8, 4096, 14336, 16384),
    Shape("DSv3", 32, 7168, 2048, 32768),
    Shape("Qwen3-235B", 16, 4096, 1536, 32768),
    Shape("gpt-oss-120b", 32, 2880, 2880, 32768),
    Shape("Qwen3-30B", 128, 2048, 768, 65536),
    Shape("Llama-4 Maverick", 8, 5120, 8192, 16384),
)
"""Experts (G, K, F, M) of whole MLPs: [2F, K] and [K, F]; one expert-parallel rank of each model."""

SMALL_BLOCK: tuple[Shape, ...] = (Shape("small", 4, 128, 192, 256),)
"""The default on a CPU."""


def parse_shapes(texts: Sequence[str]) -> tuple[Shape, ...]:
    """Shapes of `G,K,N,M` texts; `InputError` says which part does not fit."""
    shapes = []
    for text in texts:
        parts = [part.strip() for part in text.replace("x", ",").split(",")]
        if len(parts) != 4 or not all(part.isdecimal() for part in parts):
            raise InputError(f"--shape is {text!r}; give G,K,N,M (groups, in-features, out-features, rows)")
        groups, k, n, rows = (int(part) for part in parts)
        if not (1 <= groups <= 1024 and 1 <= rows < 1 << 30):
            raise InputError(f"--shape is {text!r}; G is 1 to 1024 and M 1 to 2^30 - 1")
        if not all(side % 16 == 0 and 16 <= side <= 1 << 20 for side in (k, n)):
            raise InputError(f"--shape is {text!r}; K and N are multiples of 16 up to 2^20")
        shapes.append(Shape(OWN, groups, k, n, rows))
    repeated = next((shape for shape in shapes if shapes.count(shape) > 1), None)
    if repeated is not None:
        raise InputError(f"--shape names {repeated.text} twice; give each shape once")
    return tuple(shapes)


@dataclass(frozen=True, slots=True)
class Grouping:
    """Group sizes of one table; they sum to the rows, so every row that is allocated is worked on."""

    name: Literal["even", "ragged"]
    sizes: tuple[int, ...]

    @property
    def label(self) -> str:
        """Such as "8 even"."""
        return f"{len(self.sizes)} {self.name}"


def even(rows: int, groups: int) -> Grouping:
    """`groups` sizes that differ by one row at most."""
    return Grouping("even", tuple(rows // groups + (index < rows % groups) for index in range(groups)))


def ragged(rows: int, groups: int, seed: int) -> Grouping:
    """Sizes in proportion to one Dirichlet(0.5, ...) draw, the middle group empty: what a skewed router gives."""
    import numpy as np

    share = np.random.default_rng(seed).dirichlet([0.5] * groups)
    share[groups // 2] = 0.0
    ends = np.rint(np.cumsum(share) / share.sum() * rows).astype(np.int64)
    return Grouping("ragged", tuple(int(size) for size in np.diff(ends, prepend=0)))


def sizes_of(shape: Shape, name: str, seed: int) -> tuple[int, ...]:
    """Group sizes that sum to the rows: even, or one Dirichlet(0.5) draw with the middle group empty."""
    if name == "even" or shape.groups == 1:
        return even(shape.rows, shape.groups).sizes
    return ragged(shape.rows, shape.groups, seed).sizes
