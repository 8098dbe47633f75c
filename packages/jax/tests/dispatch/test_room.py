"""Room: every GEMM of a call leaves it, no bit depends on it, and what cannot leave any says so.

No GPU is needed: JAX's device is described as one, and a backend whose GEMMs are the reference's notes their limits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import octavo
import octavo_jax
import octavo_registry
from octavo import OctavoError
from octavo_jax import MeshAxes, Room, moe
from octavo_jax.dispatch import device
from octavo_jax.dispatch.layer import LayerOptions, layer_for
from octavo_jax.plugin import CARD
from octavo_jax.reference.backend import ReferenceBackend
from octavo_registry import BackendCard, Capability, hookimpl
from octavo_registry.contract import AnyBound, AnyRequest, Backend

M, K, N, G, F = 24, 64, 16, 3, 32
SIZES = np.array([9, 0, 8], np.int32)
RECIPE = octavo.recipe("fp8-current")  # which JAX traces fastest
GEMMS = ("fprop", "dgrad", "wgrad")
BACKENDS = ("limiting", "jax-reference")
WITHIN = {(gemm, 116) for gemm in GEMMS}


class Limiting(Backend):
    """The reference's GEMMs; `bound` and `ran` have (GEMM, limit), 0 without one, of those bound and traced."""

    def __init__(self) -> None:
        self.bound: list[tuple[str, int]] = []
        self.ran: list[tuple[str, int]] = []
        row: dict[str, Any] = {"ops": GEMMS, "recipes": CARD.capabilities[0].recipes, "weights": {"nk", "kn"}}
        capability = Capability(framework="jax", device="cuda", **row)
        self.card = BackendCard(name="limiting", api_level=5, priority=0, capabilities=(capability,))

    @hookimpl
    def octavo_backends(self) -> tuple[BackendCard, ...]:
        return (self.card,)

    @hookimpl
    def octavo_load(self, name: str) -> Backend | None:
        return self if name == "limiting" else None

    def refuses(self, request: AnyRequest) -> str | None:
        return None

    def bind(self, request: AnyRequest) -> AnyBound:
        answer: Any = ReferenceBackend().bind(request)
        noting = partial(self._noting, request.op, answer.run)
        return replace(answer, run=noting(0), limited=noting)  # type: ignore[no-any-return]

    def _noting(self, op: str, run: Callable[..., Any], most: int) -> Callable[..., Any]:
        self.bound.append((op, most))

        def noted(*operands: Any, **more: Any) -> Any:
            self.ran.append((op, most))
            return run(*operands, **more)

        return noted


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Limiting]:
    """A device of 132 multiprocessors, by its description, and a backend for it."""
    described = SimpleNamespace(
        platform="gpu", compute_capability="9.0", core_count=132, client=SimpleNamespace(platform_version="cuda 13000")
    )
    monkeypatch.setattr(device, "device_holding", lambda x: described)
    backend = Limiting()
    octavo_registry.register(backend, "limiting")
    yield backend
    octavo_registry.unregister("limiting")


def _normal(rng: np.random.Generator, *shape: int) -> Any:
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def _gradients(call: Callable[..., Any], *arrays: Any) -> Any:
    """The result, or the first of them, and gradients of all arrays."""

    def loss(*arrays: Any) -> Any:
        y = call(*arrays)
        y = y[0] if isinstance(y, tuple) else y
        return jnp.sum(y.astype(jnp.float32) ** 2), y

    return jax.grad(loss, argnums=tuple(range(len(arrays))), has_aux=True)(*arrays)


def _layer(x: Any, kernel: Any, **how: Any) -> Any:
    return octavo_jax.grouped_dense(x, kernel, SIZES, recipe=RECIPE, **how)


Call = tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]

EXPERTS = ((M, K), (K, G), (G, K, 2 * F), (G, F, N))

CALLS: dict[str, Call] = {
    "grouped_dense": (_layer, ((M, K), (G, K, N))),
    "dense": (partial(octavo_jax.dense, recipe=None), ((M, K), (K, N))),
    "layernorm_dense": (partial(octavo_jax.layernorm_dense, recipe=RECIPE), ((M, K), (K, N), (K,))),
    "ragged_dot": (partial(octavo_jax.ragged_dot, group_sizes=SIZES, recipe=None), ((M, K), (G, K, N))),
    "grouped_mlp": (
        partial(octavo_jax.grouped_mlp, group_sizes=SIZES, recipe=RECIPE),
        ((M, K), (G, K, 2 * F), (G, F, N)),
    ),
    "layernorm_mlp": (partial(octavo_jax.layernorm_mlp, recipe=None), ((M, K), (K,), (K, 2 * F), (F, N))),
    "moe_mlp": (partial(moe.moe_mlp, k=2, recipe=None), EXPERTS),
    "moe_mlp, lean": (partial(moe.moe_mlp, k=2, recipe=None, form="lean"), EXPERTS),
    "moe_mlp, recompute": (partial(moe.moe_mlp, k=2, recipe=RECIPE, form="recompute", weight_codes="remake"), EXPERTS),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_gemm_of_a_call_runs_within_the_limit(name: str, gpu: Limiting, rng: np.random.Generator) -> None:
    """Forward, backward, and what the backward pass makes again: one that took all would keep a collective waiting."""
    call, shapes = CALLS[name]
    arrays = [_normal(rng, *shape) for shape in shapes]
    jax.make_jaxpr(partial(_gradients, partial(call, backend=BACKENDS, room=Room(gemms=16))))(*arrays)
    assert set(gpu.ran) == WITHIN


def _scanned(call: Callable[..., Any], x: Any, kernel: Any) -> Any:
    def body(carry: Any, kernel: Any) -> tuple[Any, Any]:
        return carry, call(carry, kernel)

    return jax.lax.scan(body, x, jnp.stack([kernel, 2 * kernel]))[1]


def _mapped(call: Callable[..., Any], x: Any, kernel: Any) -> Any:
    return jax.vmap(call, in_axes=(None, 0))(x, jnp.stack([kernel, 2 * kernel]))


UNDER: dict[str, Callable[..., Any]] = {
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "scan": partial(partial, _scanned),
    "vmap": partial(partial, _mapped),
}


@pytest.mark.parametrize("name", UNDER)
def test_transformations_leave_it(name: str, gpu: Limiting) -> None:
    """Forward, backward, and a forward pass that is computed again."""
    call = UNDER[name](partial(_layer, backend=BACKENDS, room=Room(gemms=16)))
    jax.make_jaxpr(partial(_gradients, call))(jnp.ones((M, K)), jnp.ones((G, K, N)))
    assert set(gpu.ran) == WITHIN


def test_no_bit_depends_on_it(gpu: Limiting, rng: np.random.Generator) -> None:
    """Results and gradients are those of the layer that takes all."""
    arrays = _normal(rng, M, K), _normal(rng, G, K, N)
    limited, free = (
        jax.jit(partial(_gradients, partial(_layer, backend=BACKENDS, room=room)))(*arrays)
        for room in (Room(gemms=16), None)
    )
    assert set(gpu.ran) == WITHIN | {(gemm, 0) for gemm in GEMMS}
    for one, other in zip(jax.tree.leaves(limited), jax.tree.leaves(free), strict=True):
        assert np.asarray(one).any()
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def _mesh(kind: AxisType) -> Mesh:
    if jax.device_count() < 4:
        pytest.skip("fewer than four devices: nothing to shard over")
    return jax.make_mesh((2, 2), ("ep", "fsdp"), (kind, kind), devices=jax.devices()[:4])


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_gemms_on_a_mesh_run_within_it(kind: AxisType, gpu: Limiting) -> None:
    """What runs on a shard is the limited function: there are the collectives that it leaves room for."""
    mesh, sizes = _mesh(kind), jnp.broadcast_to(jnp.asarray(SIZES), (2, 2, G))

    def layer(x: Any, kernel: Any) -> Any:
        axes = MeshAxes(ep="ep", fsdp="fsdp", moves="allow")
        how: dict[str, Any] = {"recipe": RECIPE, "sharding": axes, "backend": BACKENDS}
        return octavo_jax.grouped_dense(x, kernel, sizes, room=Room(gemms=16), **how)

    lies = NamedSharding(mesh, P("ep", "fsdp"))  # type: ignore[no-untyped-call]
    x, kernel = (jax.device_put(jnp.ones(shape), lies) for shape in ((2, 2, M, K), (2 * G, K, N)))
    with jax.set_mesh(mesh):
        jax.make_jaxpr(partial(_gradients, layer))(x, kernel)
    assert set(gpu.ran) == WITHIN


@pytest.mark.parametrize("way", ["gather", "ragged"])
def test_experts_over_a_mesh_run_within_it(way: Any, gpu: Limiting) -> None:
    """Beside the exchange of tokens, whichever way these go."""
    axes, exchange = MeshAxes(ep="ep", fsdp="fsdp", moves="allow"), moe.Exchange(way=way)
    how: dict[str, Any] = {"k": 1, "recipe": RECIPE, "sharding": axes, "exchange": exchange, "backend": BACKENDS}
    with jax.set_mesh(_mesh(AxisType.Auto)):
        shapes = (4 * M, K), (K, 4), (4, K, 2 * F), (4, F, K)
        call = partial(moe.moe_mlp, room=Room(gemms=16), **how)
        jax.make_jaxpr(partial(_gradients, call))(*(jnp.ones(shape) for shape in shapes))
    assert set(gpu.ran) == WITHIN


def test_equal_rooms_share_a_layer_and_others_do_not(gpu: Limiting) -> None:
    """A limit is part of every key, so no call runs another's; nothing is bound or traced twice for the same one."""
    x, kernel = jnp.ones((M, K)), jnp.ones((G, K, N))

    def layer(room: Room | None, **options: Any) -> Any:
        return layer_for(LayerOptions.of(RECIPE, backend=BACKENDS, room=room, **options), x, kernel)

    sixteen = layer(Room(gemms=16))
    assert layer(Room(gemms=16)) is sixteen
    assert layer(Room(gemms=8)) is not sixteen
    assert layer(Room()) is layer(None) is not sixteen
    assert layer(Room(gemms=16), checkpoint_name="mine").plan.wgrad.run is sixteen.plan.wgrad.run
    limits = [(gemm, most) for gemm, most in gpu.bound if most]
    assert sorted(limits) == sorted((gemm, most) for gemm in GEMMS for most in (116, 124))
    for left in (16, 16, 8):
        jax.eval_shape(partial(_layer, backend=BACKENDS, room=Room(gemms=left)), x, kernel)
    assert gpu.ran == [("fprop", 116), ("fprop", 124)]


def test_explain_says_on_how_many(gpu: Limiting) -> None:
    """The only trace that a limit leaves: no result tells of it."""
    x, kernel = jnp.ones((M, K)), jnp.ones((G, K, N))
    report = octavo_jax.explain(x, kernel, SIZES, recipe=RECIPE, backend=BACKENDS, room=Room(gemms=16))
    assert str(report).count("on 116 of 132 multiprocessors") == 3
    assert "multiprocessors" not in str(octavo_jax.explain(x, kernel, SIZES, recipe=RECIPE, backend=BACKENDS))


@pytest.mark.usefixtures("on_a_cpu")
def test_on_a_cpu_nothing_changes(rng: np.random.Generator) -> None:
    """There are no multiprocessors, and one program runs on both: the layer and its trace are those without a room."""
    arrays = _normal(rng, M, K), _normal(rng, G, K, N)
    rooms = (None, Room(gemms=16), Room(gemms=10_000))
    first, *others = (layer_for(LayerOptions.of(RECIPE, room=room), *arrays) for room in rooms)
    assert all(other is first for other in others)
    plain, limited = (_layer(*arrays, room=room) for room in (None, Room(gemms=16)))
    assert np.asarray(plain).any()
    assert np.array_equal(plain, limited)


@pytest.mark.parametrize("gemms", [-1, True, 1.5, None, "16"])
def test_rooms_that_mean_nothing_are_refused(gemms: Any) -> None:
    """A number that is none, or that leaves less than nothing."""
    with pytest.raises(ValueError, match=f"Room's gemms is {gemms!r}; give a number of multiprocessors, 0 or more"):
        Room(gemms=gemms)


@pytest.mark.parametrize("name", CALLS)
def test_what_is_no_room_is_refused(name: str) -> None:
    """On a CPU, too: a number would be taken for one there, and fail on the first GPU."""
    call, shapes = CALLS[name]
    with pytest.raises(ValueError, match=r"room is 16; give an octavo_jax\.Room"):
        jax.eval_shape(partial(call, room=16), *(jnp.ones(shape) for shape in shapes))


def test_a_limit_is_never_ignored(gpu: Limiting, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend without one, a device without more, and one whose number JAX does not tell."""
    x, kernel = jnp.ones((M, K)), jnp.ones((G, K, N))
    with pytest.raises(OctavoError, match=r"jax-reference has no limit for its fprop; .* such as jax-native"):
        _layer(x, kernel, backend="jax-reference", room=Room(gemms=16))
    for _ in range(2):
        with pytest.raises(ValueError, match="leaves 132 multiprocessors to others and the cuda device has 132; leave"):
            _layer(x, kernel, backend=BACKENDS, room=Room(gemms=132))
    silent = SimpleNamespace(platform="gpu", compute_capability="9.0", client=None)
    monkeypatch.setattr(device, "device_holding", lambda x: silent)
    with pytest.raises(OctavoError, match="it has no core_count; leave room out"):
        _layer(x, kernel, backend=BACKENDS, room=Room(gemms=16))
    assert gpu.ran == []
