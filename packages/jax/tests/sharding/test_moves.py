"""Arrays of Auto meshes that are not placed as their roles ask: nothing moves in silence."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import moe_cases
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import octavo_jax
from octavo_jax import MeshAxes, MoveWarning, moe
from octavo_jax.moe.local_block import BlockArrays, BlockResult, MoeBlock
from octavo_jax.traffic import collectives

AXES = MeshAxes(ep="ep", fsdp="fsdp")
E, F, M, K, N, G = 2, 2, 8, 32, 16, 2
SHAPES = {"x": (E, F, M, K), "kernel": (E * G, K, N), "group_sizes": (E, F, G), "bias": (E * G, N)}
FITTING = {"x": P("ep", "fsdp"), "kernel": P("ep", "fsdp"), "group_sizes": P("ep", "fsdp"), "bias": P("ep")}
BACKEND = "jax-reference"


@pytest.fixture(autouse=True)
def _compiled_here() -> Iterator[None]:
    """A program from the cache of an earlier run is not partitioned again, so that nothing is said of it."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", before)
    compilation_cache.reset_cache()


@pytest.fixture
def mesh(mesh_of: Any) -> Any:
    if jax.device_count() < 8:
        pytest.skip("fewer than eight devices")
    return mesh_of(ep=2, fsdp=2, tp=2)


def _shapes(mesh: Any, **specs: P) -> list[Any]:
    """Of x, kernel, group_sizes and bias in bf16, as they fit but for `specs`."""
    return [
        jax.ShapeDtypeStruct(
            shape,
            jnp.int32 if name == "group_sizes" else jnp.bfloat16,
            sharding=NamedSharding(mesh, specs.get(name, FITTING[name])),
        )
        for name, shape in SHAPES.items()
    ]


def _layer(x: Any, kernel: Any, sizes: Any, bias: Any, sharding: MeshAxes | None = AXES) -> Any:
    return octavo_jax.grouped_dense(x, kernel, sizes, recipe=None, bias=bias, sharding=sharding, backend=BACKEND)


def _told(function: Callable[..., Any], *arguments: Any) -> list[str]:
    """The warnings of a program's compilation, in order of their text."""
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        jax.jit(function).lower(*arguments).compile()
    assert all(record.category is MoveWarning for record in records)
    assert {record.filename for record in records} <= {__file__}, "the caller's own line"
    return sorted(str(record.message) for record in records)


def test_every_array_is_told_of_with_its_bytes(mesh: Any) -> None:
    """Under jit, forward and backward: the array, how it is placed, what its role wants, and what a device lacks."""
    bad = {
        "x": P("ep", "fsdp", None, "tp"),
        "kernel": P("ep", None, "fsdp"),
        "bias": P("fsdp"),
        "group_sizes": P("ep", "tp"),
    }

    def step(x: Any, kernel: Any, sizes: Any, bias: Any, dy: Any) -> Any:
        y, pull = jax.vjp(lambda x, kernel, bias: _layer(x, kernel, sizes, bias), x, kernel, bias)
        return y, pull(dy)

    dy = jax.ShapeDtypeStruct((E, F, M, N), jnp.bfloat16, sharding=NamedSharding(mesh, P("ep", "fsdp", "tp")))
    told = _told(step, *_shapes(mesh, **bad), dy)
    expected = {
        "bias [4, 16]": ("P('fsdp', None)", "P('ep', None)", 2 * N * 2),
        "group_sizes [2, 2, 2]": ("P('ep', 'tp', None)", "P('ep', 'fsdp', None)", G * 4),
        "kernel [4, 32, 16]": ("P('ep', None, 'fsdp')", "P('ep', 'fsdp', None)", G * (K // 2) * (N // 2) * 2),
        "the gradient of y [2, 2, 8, 16]": ("P('ep', 'fsdp', 'tp', None)", "P('ep', 'fsdp', None, None)", M * N),
        "x [2, 2, 8, 32]": ("P('ep', 'fsdp', None, 'tp')", "P('ep', 'fsdp', None, None)", M * K),
    }
    assert len(told) == len(expected)
    for text, (what, (placed, wanted, size)) in zip(told, expected.items(), strict=True):
        sentence = (
            f"grouped_dense: {what} is placed as {placed} and sharding needs {wanted}: a device fetches {size} bytes"
        )
        assert text.startswith(sentence), text


def test_a_forward_pass_that_nobody_reads(mesh: Any) -> None:
    """Of a loss that is linear in y, the backward pass alone is left: it reads what was kept, and tells of it."""

    def gradients(x: Any, kernel: Any, sizes: Any, bias: Any) -> Any:
        return jax.grad(lambda x, kernel: _layer(x, kernel, sizes, bias).sum(), argnums=(0, 1))(x, kernel)

    told = _told(gradients, *_shapes(mesh, x=P("ep", "fsdp", "tp"), kernel=P("ep", None, "fsdp")))
    assert [text.split(" is placed")[0] for text in told] == [
        "grouped_dense: kernel [4, 32, 16]",
        "grouped_dense: x [2, 2, 8, 32]",
    ]


def test_an_error_on_request(mesh: Any) -> None:
    """By an argument, or by Python's filter of the category; the caller's line is in the sentence's traceback."""
    shapes, sentence = _shapes(mesh, x=P("ep", "fsdp", "tp")), r"grouped_dense: x \[2, 2, 8, 32\] is placed as P\("
    strict = jax.jit(partial(_layer, sharding=replace(AXES, moves="error")))
    with pytest.raises(jax.errors.JaxRuntimeError, match=sentence):
        strict.lower(*shapes).compile()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=MoveWarning)
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"MoveWarning: {sentence}"):
            jax.jit(_layer).lower(*shapes).compile()
    strict.lower(*_shapes(mesh)).compile()
    with pytest.raises(ValueError, match="moves is 'shout'; give 'warn', 'error' or 'allow'"):
        MeshAxes(moves="shout")  # type: ignore[arg-type]


def test_what_is_allowed_is_not_in_the_program(mesh: Any) -> None:
    """moves="allow" asks XLA nothing, nor does a program for `jax.export`; else one text has one policy, so that a
    program that warned does not come from the compilation cache where it should fail."""
    shapes = _shapes(mesh, x=P("ep", "fsdp", "tp"))
    texts = {
        moves: jax.jit(partial(_layer, sharding=replace(AXES, moves=moves))).lower(*shapes).as_text()
        for moves in ("warn", "error", "allow")
    }
    assert "octavo_placement" not in texts["allow"]
    assert texts["warn"] != texts["error"]
    assert __file__ not in texts["warn"], "no place of a file system is in what the cache's key is made of"
    assert "octavo_placement" not in jax.export.export(jax.jit(_layer))(*shapes).mlir_module()


def test_one_warning_in_a_scan_with_remat(mesh: Any) -> None:
    """An array that the program computes itself is read in each layer, again in the backward pass, and told of once."""

    def loss(kernels: Any, x: Any, sizes: Any, bias: Any) -> Any:
        @jax.checkpoint
        def block(x: Any, kernel: Any) -> Any:
            x = jax.lax.with_sharding_constraint(jnp.tanh(x), NamedSharding(mesh, P("ep", "fsdp", "tp")))
            y = _layer(x, kernel, sizes, bias)
            return jnp.concatenate([y, y], axis=-1), None

        return jax.lax.scan(block, x, kernels)[0].sum()

    x, kernel, sizes, bias = _shapes(mesh)
    kernels = jax.ShapeDtypeStruct(
        (3, *kernel.shape), kernel.dtype, sharding=NamedSharding(mesh, P(None, "ep", "fsdp"))
    )
    told = [text for text in _told(jax.grad(loss), kernels, x, sizes, bias) if " x [" in text]
    assert len(told) == 1
    assert "is placed as P('ep', 'fsdp', 'tp', None)" in told[0]


@pytest.mark.parametrize("layer", ["grouped_dense", "grouped_mlp", "moe_mlp"])
def test_no_residual_is_the_observed_copy(layer: str, mesh: Any) -> None:
    """A scan over layers of high precision keeps no second stack of their kernels."""
    x, sizes = jnp.zeros((2, 2, 4, 8)), jnp.zeros((2, 2, 2), jnp.int32)
    wi, wo, router = jnp.zeros((3, 4, 8, 16)), jnp.zeros((3, 4, 8, 8)), jnp.zeros((8, 4))
    how: dict[str, Any] = {"recipe": None, "sharding": AXES, "backend": BACKEND}

    def body(x: Any, kernels: Any) -> Any:
        wi, wo = kernels
        if layer == "grouped_dense":
            y = octavo_jax.grouped_dense(x, wo, sizes, **how)
        elif layer == "grouped_mlp":
            y = octavo_jax.grouped_mlp(x, wi, wo, sizes, **how)
        else:
            y = moe.moe_mlp(x.reshape(16, 8), router, wi, wo, k=2, **how)[0].reshape(x.shape)
        return y, None

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        jaxpr = jax.make_jaxpr(jax.grad(lambda *k: jax.lax.scan(body, x, k)[0].sum(), argnums=(0, 1)))(wi, wo)
    forward = next(equation for equation in jaxpr.eqns if equation.primitive.name == "scan")
    stacked = [value.aval.shape for value in forward.outvars]
    assert not {(3, 4, 8, 16), (3, 4, 8, 8)} & set(stacked), stacked


def test_without_roles(mesh: Any) -> None:
    """Every device reads the whole of an array then, and the sentence names both ways out; `MeshAxes(moves="allow")` is
    the third."""
    shapes = _shapes(mesh, kernel=P(), bias=P(), group_sizes=P())
    (told,) = _told(partial(_layer, sharding=None), *shapes)
    size = (E * F - 1) * M * K * 2
    assert f"no mesh axis has a role, so that every device reads all of it: a device fetches {size} bytes" in told
    assert "sharding=octavo_jax.MeshAxes(...) or octavo_jax.mesh_roles" in told
    assert _told(partial(_layer, sharding=MeshAxes(moves="allow")), *shapes) == []


def test_a_mesh_that_is_known_when_the_program_is_lowered(mesh: Any) -> None:
    """`in_shardings` of shapes, and the old `with mesh:`, tell of no mesh while a program is traced."""
    shapes = _shapes(mesh, kernel=P("ep", None, "fsdp"))
    plain = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in shapes]
    sentence = r"kernel \[4, 32, 16\] is placed as P\('ep', None, 'fsdp'\) and sharding needs P\('ep', 'fsdp', None\)"
    with pytest.warns(MoveWarning, match=sentence):
        jax.jit(_layer, in_shardings=[one.sharding for one in shapes]).lower(*plain).compile()


def test_a_partly_manual_caller(mesh: Any) -> None:
    """What the caller has cut is its own; the axes that it left to XLA are looked at."""
    specs = (P("ep"), P("ep"), P("ep"), P("ep"))
    inside = jax.shard_map(_layer, mesh=mesh, in_specs=specs, out_specs=P("ep"), axis_names={"ep"}, check_vma=False)
    (told,) = _told(inside, *_shapes(mesh, kernel=P("ep", None, "fsdp")))
    assert "kernel [2, 32, 16] is placed as P(None, None, 'fsdp') and sharding needs P(None, 'fsdp', None)" in told


def test_under_vmap(mesh: Any) -> None:
    """The new dimension is one that no role cuts."""
    x, kernel, sizes, bias = _shapes(mesh, kernel=P("ep", None, "fsdp"))
    stacked = jax.ShapeDtypeStruct(
        (3, *kernel.shape), kernel.dtype, sharding=NamedSharding(mesh, P(None, "ep", None, "fsdp"))
    )
    (told,) = _told(jax.vmap(_layer, in_axes=(None, 0, None, None)), x, stacked, sizes, bias)
    assert "sharding needs P(None, 'ep', 'fsdp', None)" in told or "sharding needs P('ep', None, 'fsdp', None)" in told


def test_an_mlps_second_kernel_has_its_name(mesh: Any) -> None:
    """Laid out like the first, which is the natural guess."""

    def mlp(x: Any, wi: Any, wo: Any, sizes: Any) -> Any:
        return octavo_jax.grouped_mlp(x, wi, wo, sizes, recipe=None, sharding=AXES, backend=BACKEND)

    x, kernel, sizes, _ = _shapes(mesh)
    wo = jax.ShapeDtypeStruct((4, 8, 32), jnp.bfloat16, sharding=NamedSharding(mesh, P("ep", "fsdp")))
    (told,) = _told(mlp, x, kernel, wo, sizes)
    wanted = "wo [4, 8, 32] is placed as P('ep', 'fsdp', None) and sharding needs P('ep', None, 'fsdp')"
    assert told.startswith(f"grouped_mlp: {wanted}")


def test_a_moe_block(mesh: Any, placed: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own arguments by its own names, eagerly and compiled. Eagerly what runs on each device stands aside, for
    operation by operation it takes seconds to compile."""
    a = {name: one for name, one in moe_cases.block_arrays(rng).items() if name in ("x", "router", "wi", "wo")}
    lie = {"x": P(("fsdp", "ep")), "router": P(), "wi": P("ep", "fsdp"), "wo": P("ep", "fsdp")}
    a = dict(zip(a, placed(mesh, list(a.values()), [lie[name] for name in a]), strict=True))

    def block(a: Any) -> Any:
        return moe.moe_mlp(**a, k=2, recipe=None, sharding=AXES, backend=BACKEND)[0]

    with jax.set_mesh(mesh):
        (told,) = _told(block, a)
        assert told.startswith(
            "moe_mlp: wo [8, 32, 64] is placed as P('ep', 'fsdp', None) and sharding needs P('ep', None"
        )
        monkeypatch.setattr(MoeBlock, "run", _x_alone)
        with warnings.catch_warnings():
            warnings.simplefilter("always", MoveWarning)
            warnings.showwarning = _stop
            with pytest.raises(_Stopped, match=re.escape(told)) as said:
                block(a)
        assert said.value.args[1:] == (MoveWarning, __file__), "not the file of who takes old names"


def _x_alone(_: MoeBlock, given: BlockArrays) -> BlockResult:
    return BlockResult(given.x, moe.RouterStats(jnp.zeros(moe_cases.E, jnp.int32), jnp.float32(0)), None)


class _Stopped(Exception):
    """By a warning: its text, its category and the file that it is of."""


def _stop(message: Any, category: Any, filename: str, *_: Any, **__: Any) -> None:
    raise _Stopped(str(message), category, filename)


def test_roles_without_a_mesh(rng: np.random.Generator) -> None:
    """On one device `sharding=` is not passed over; shapes may be asked for without a mesh."""
    arrays = [jnp.asarray(rng.standard_normal(SHAPES[name]), jnp.float32) for name in ("x", "kernel")]
    sizes, bias = jnp.ones(SHAPES["group_sizes"], jnp.int32), jnp.zeros(SHAPES["bias"])
    for call in (_layer, jax.jit(_layer)):
        with pytest.raises(
            ValueError, match=r"grouped_dense was given sharding and there is no mesh.*jax\.set_mesh\(mesh\)"
        ):
            call(*arrays, sizes, bias)
    assert jax.eval_shape(_layer, *arrays, sizes, bias).shape == (E, F, M, N)


def test_explain_reads_the_arrays(mesh: Any, placed: Any) -> None:
    """How each is placed and what has to move, as the compiled program moves it; what is traced is not known."""
    arrays = [
        jnp.ones(SHAPES[name], jnp.int32 if name == "group_sizes" else jnp.float32)
        for name in ("x", "kernel", "group_sizes")
    ]
    ask = partial(octavo_jax.explain, backend=BACKEND)
    x, kernel, sizes = placed(mesh, arrays, [P("ep", "fsdp", None, "tp"), P("ep", "fsdp"), P("ep", "fsdp")])
    layer = partial(octavo_jax.grouped_dense, recipe=None, backend=BACKEND, sharding=replace(AXES, moves="allow"))
    report = ask(x, kernel, sizes, recipe=None, sharding=AXES)
    (move,) = report.misplaced
    assert (move.array, move.placed, move.wanted) == ("x", "P('ep', 'fsdp', None, 'tp')", "P('ep', 'fsdp', None, None)")
    moved = [one for one in collectives(jax.jit(layer).lower(x, kernel, sizes).compile()) if M in one.results[0].shape]
    assert move.bytes_received == sum(one.bytes for one in moved) // 2  # a device has one of the two parts
    assert report.placed["x"] == "placed as P('ep', 'fsdp', None, 'tp')"
    assert f"before the layer: {move}" in str(report)
    assert "nothing moves" not in str(report)
    alone = ask(x, kernel, sizes, recipe=None)
    assert (alone.route, len(alone.misplaced)) == ("single", 3)
    assert "nothing moves" not in str(alone)
    seen: list[str] = []
    jax.eval_shape(
        lambda *arrays: seen.append(str(ask(*arrays, recipe=None, sharding=MeshAxes(ep="ep")))), x, kernel, sizes
    )
    assert "x needs P('ep', None, None, None), is traced, so that its place is not known" in seen[0]
    assert "nothing moves between devices, as far as is known of ['x', 'kernel', 'group_sizes']" in seen[0]
