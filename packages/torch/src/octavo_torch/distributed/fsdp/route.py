"""How FSDP2 gathers a grouped layer's weight: as codes where the recipe's scales allow it, else as values."""

from __future__ import annotations

from dataclasses import dataclass

from octavo import QuantizerSpec, Recipe

_DIMS = "GNK"


@dataclass(frozen=True)
class Route:
    """How one weight goes through the all-gather, the same on every rank. Printable.

    dim     the axis of [G, N, K] that is sharded
    spec    how each rank quantizes its shard; None: high-precision values are gathered
    why     the reason where values are gathered
    shares  the groups' amax is reduced over the ranks before a shard is quantized
    """

    dim: int
    spec: QuantizerSpec | None
    why: str = ""
    shares: bool = False

    def __str__(self) -> str:
        where = f"sharded on dim {self.dim} ({_DIMS[self.dim]})"
        if self.spec is None:
            return f"{where}: gathered unquantized, because {self.why}"
        codes = "one byte per value" if self.spec.shares_codes else "two bytes per value, one for each plane,"
        amax = "; the groups' amax is reduced first" if self.shares else ""
        return f"{where}: quantized, then gathered: {codes} and scales{amax}"


def shard_dim(local: tuple[int, ...], whole: tuple[int, ...]) -> int:
    """The axis on which `local` is a part of `whole`; 0 where both are equal."""
    return next((axis for axis, (part, full) in enumerate(zip(local, whole, strict=True)) if part != full), 0)


def route_of(recipe: Recipe, whole: tuple[int, ...], dim: int, ranks: int) -> Route:
    """The route of a weight of shape `whole` [G, N, K] in equal shards along `dim`.

    A scale depends only on the values that it covers, so a shard is quantized by itself where no block spans two
    shards; the amax of a group that spans shards is reduced. Both GEMMs that read the weight must read codes.
    """
    if ranks == 1:
        return Route(dim, None, "there is one rank, which has all of it")
    unread = [gemm for gemm in ("fprop", "dgrad") if not recipe.quantizes(gemm)]
    if unread:
        return Route(dim, None, f"{' and '.join(unread)} of recipe {recipe.kind} read{'s' * (len(unread) == 1)} values")
    spec = recipe.quantizer("w")
    assert spec is not None  # two GEMMs read it
    if len(whole) != 3:
        return Route(dim, None, f"the weight has shape {list(whole)}, and stacked matrices [G, N, K] are quantized")
    side = whole[dim]
    if side % ranks:
        return Route(dim, None, f"{side} does not divide by {ranks} ranks, and FSDP gathers no scales of padded shards")
    if dim == 0 or spec.scaling in ("current", "delayed"):
        return Route(dim, spec, shares=spec.scaling == "delayed" or dim > 0)
    if spec.scaling == "row":
        return Route(dim, None, f"one of row scaling's scales covers all of {_DIMS[dim]}, and each rank has a part")
    block = spec.block_size
    assert block is not None  # the scalings that are left have blocks
    if side // ranks % block:
        return Route(dim, None, f"a rank has {side // ranks} of {side}, which would cut a block of {block}")
    return Route(dim, spec, shares=spec.scaling == "nvfp4")
