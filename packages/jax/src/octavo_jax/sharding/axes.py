"""MeshAxes: which mesh axis plays which part in a layer, and the roles of a whole model."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import jax

from octavo.errors import one_of
from octavo_jax.array_moves.moves import POLICIES, CalledFunction, Policy

Axes = str | tuple[str, ...] | None
Role = Literal["dp", "fsdp", "tp", "ep"]
Dim = Literal["G", "K", "N"]

ROLES: tuple[Role, ...] = ("dp", "fsdp", "tp", "ep")


@dataclass(frozen=True)
class MeshAxes:
    """Roles of mesh axes. Each is None, a name, or a tuple of names, the outermost first.

    dp        shards data blocks of tokens; the kernel is the same on all of it
    fsdp      shards data blocks too, and the kernel along `fsdp_dim`: its quantized shards are gathered for a GEMM
    tp        shards the kernel along `tp_dim`, and with it y's features ("N") or x's ("K")
    ep        shards experts: blocks of tokens, and the kernel's groups
    tp_dim    "N" (column-parallel) or "K" (row-parallel)
    fsdp_dim  "K", "N" or "G"; None: "K" where tp_dim is "N", else "N"
    moves     what becomes of an array of an Auto mesh that is not placed as these roles ask, so that XLA has to move it
              between devices: "warn" of it (`MoveWarning`), an "error", or "allow" it

    Raises ValueError where a role is no name, an axis has two roles, or two roles take one dimension of the kernel.
    """

    dp: Axes = None
    fsdp: Axes = None
    tp: Axes = None
    ep: Axes = None
    tp_dim: Literal["N", "K"] = "N"
    fsdp_dim: Dim | None = None
    moves: Policy = "warn"

    def __post_init__(self) -> None:
        one_of("tp_dim", self.tp_dim, ("N", "K"))
        if self.fsdp_dim not in (None, "G", "K", "N"):
            raise ValueError(f"fsdp_dim is {self.fsdp_dim!r}; it is 'K', 'N', 'G' or None")
        one_of("moves", self.moves, POLICIES)
        taken: dict[str, Role] = {}
        for role in ROLES:
            for name in self.names(role):
                if name in taken:
                    twice = f"{taken[name]} and {role}" if taken[name] != role else f"{role} twice"
                    raise ValueError(f"mesh axis {name!r} is given as {twice}; an axis plays one part")
                taken[name] = role
        if self.fsdp and self.tp and self.fsdp_sharded == self.tp_dim:
            raise ValueError(
                f"fsdp={self.fsdp!r} and tp={self.tp!r} both shard the kernel's {self.tp_dim}; give fsdp_dim="
                f"{'K' if self.tp_dim == 'N' else 'N'!r}"
            )
        if self.fsdp and self.ep and self.fsdp_dim == "G":
            raise ValueError(
                f"fsdp={self.fsdp!r} shards the kernel's group dimension, which ep={self.ep!r} owns; give fsdp_dim='K' "
                "or 'N', or both axes to ep"
            )

    def names(self, role: Role) -> tuple[str, ...]:
        """The mesh axes of a role, the outermost first; () where it is None."""
        value = getattr(self, role)
        names = () if value is None else (value,) if isinstance(value, str) else value
        if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"{role} is {value!r}; give the name of a mesh axis, a tuple of names, or None")
        return names

    @property
    def fsdp_sharded(self) -> Dim:
        """The dimension of the kernel that fsdp shards."""
        return self.fsdp_dim or ("K" if self.tp_dim == "N" else "N")

    @property
    def every(self) -> tuple[str, ...]:
        """All axes that have a role."""
        return tuple(name for role in ROLES for name in self.names(role))


# A value of JAX's own context: what is traced under one model's roles is traced again under another's.
_model: Any = jax.make_user_context(default_value=None)  # type: ignore[no-untyped-call]


def mesh_roles(axes: MeshAxes) -> AbstractContextManager[None]:
    """A context in which every layer that is given no `sharding` takes `axes`.

    It is for one thread, and holds for what is traced in it. A jitted function that is called with other roles than
    before is traced again. `sharding=MeshAxes()` gives one layer no roles. A layer of one matrix has no experts to
    spread: ep spreads its tokens there, inside of dp and fsdp.

    Raises ValueError where `axes` is not a MeshAxes.
    """
    if not isinstance(axes, MeshAxes):
        raise ValueError(f"axes is {axes!r}; give octavo_jax.MeshAxes(ep=..., fsdp=...), which names the mesh axes")
    roles: AbstractContextManager[None] = _model(axes)
    return roles


def current_roles() -> MeshAxes | None:
    """What `mesh_roles` says here; None outside of it."""
    roles: MeshAxes | None = _model.value
    return roles


def roles_in_force(sharding: MeshAxes | None) -> MeshAxes | None:
    """The roles of a call that was given `sharding`; ValueError where that is neither a MeshAxes nor None."""
    if sharding is not None and not isinstance(sharding, MeshAxes):
        raise ValueError(
            f"sharding is {sharding!r}; give octavo_jax.MeshAxes(ep=..., fsdp=...), which names the mesh axes, or None"
        )
    return current_roles() if sharding is None else sharding


def called_function(function: str, sharding: MeshAxes | None) -> CalledFunction:
    """The public function of this name that was given `sharding`: its names in messages, and its policy on moves."""
    roles = roles_in_force(sharding)
    return CalledFunction(function, moves=roles.moves) if isinstance(roles, MeshAxes) else CalledFunction(function)
