"""The MoE block whose experts are spread over a mesh against the same block on one device."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from moe_cases import BACKEND, CHOICES, SHAPES, Arrays, E, F, N, T, assert_sums_agree, block_arrays, emulated, step

import octavo
import octavo_jax
from octavo_jax import moe
from octavo_jax.moe import expert_parallel, ragged_exchange
from octavo_jax.moe.local_block import BlockArrays, BlockResult, MoeBlock
from octavo_jax.policies import save_quantized
from octavo_jax.traffic import collectives

SLOW = pytest.mark.slow
KERNELS = ("wi", "wo")
RULES: tuple[dict[str, Any], ...] = (
    {},
    {"score": "sigmoid", "groups": 4, "kept_groups": 2, "scale": 2.5, "choice_bias": np.linspace(-1, 1, E)},
    {"score": "sqrtsoftplus", "renormalize": False, "replay": np.arange(T * CHOICES).reshape(T, CHOICES) % (E + 1)},
)
"""Ways to choose; of the last one some choices are nobody's."""


@pytest.fixture(autouse=True)
def ragged_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA's ragged_all_to_all where there is one, else its definition."""
    if jax.default_backend() == "cpu":
        monkeypatch.setattr(ragged_exchange, "exchange_rows", emulated)
        monkeypatch.setattr(expert_parallel, "WITHOUT_RAGGED_ALL_TO_ALL", ())


@pytest.mark.parametrize(
    ("axes", "way", "kind", "recipe"),
    [
        ({"fsdp": 2, "ep": 4}, "gather", AxisType.Explicit, "bf16"),
        pytest.param({"dp": 2, "ep": 4}, "ragged", AxisType.Auto, "bf16", marks=SLOW),
        pytest.param({"ep": 8}, "ragged", AxisType.Auto, "mxfp8", marks=SLOW),
        pytest.param({"fsdp": 2, "ep": 2}, "gather", AxisType.Explicit, "mxfp8", marks=SLOW),
        pytest.param({"dp": 2, "a": 2, "b": 2}, "gather", AxisType.Auto, "mxfp8", marks=SLOW),
        pytest.param({"dp": 2, "fsdp": 2, "ep": 2}, "ragged", AxisType.Explicit, "bf16", marks=SLOW),
        pytest.param({"dp": 8, "ep": 1}, "ragged", AxisType.Auto, "mxfp8", marks=SLOW),
        pytest.param({"fsdp": 8}, "gather", AxisType.Auto, "bf16", marks=SLOW),
    ],
)
def test_a_spread_block_is_the_block(
    axes: dict[str, int], way: Any, kind: AxisType, recipe: str, mesh_of: Any, rng: np.random.Generator
) -> None:
    """y, statistics and all gradients, with a mask and NaN in the padding; each expert sees its rows in one device's
    order, so what is quantized of them is the same. Two axes may share the experts, one of size 1 may have them all.
    Each run draws where the weights multiply, with them on the activation the second bias, too, and how the router
    chooses."""
    a, on, rule = block_arrays(rng), str(rng.choice(["output", "activation"])), int(rng.integers(len(RULES)))
    print(f"weights on the {on}, {RULES[rule]}")  # shown by pytest where the test fails
    mask = jnp.asarray(rng.random(T) < 0.8).at[0].set(True)
    a["x"] = jnp.where(mask[:, None], a["x"], jnp.nan)
    experts = ("a", "b") if "a" in axes else "ep" if "ep" in axes else None
    roles = octavo_jax.MeshAxes(**{role: role if role in axes else None for role in ("dp", "fsdp")}, ep=experts)
    here = partial(step, recipe=octavo.recipe(recipe), mask=mask, weights_on=on, **RULES[rule])
    (y, stats), wanted = jax.jit(here)(a)
    run = partial(here, sharding=roles, exchange=moe.Exchange(way))
    with jax.set_mesh(mesh_of(kind, **axes)):
        (spread_y, spread_stats), gradients = jax.jit(run)(a)
    assert not np.asarray(spread_y)[~np.asarray(mask)].any()
    assert np.array_equal(spread_stats.load, stats.load)
    assert spread_stats.dropped is None
    assert_sums_agree(spread_stats.balance_loss, stats.balance_loss, "balance loss")
    assert_sums_agree(spread_y, y, "y")
    for name, gradient in gradients.items():
        assert_sums_agree(gradient, wanted[name], name)
        if name in KERNELS and set(axes) == {"ep"}:
            assert np.array_equal(gradient, wanted[name]), name  # the same rows in the same order


def test_numpys_masks_and_choices_without_jit(
    mesh_of: Any, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """Under `jax.grad` on an Auto mesh they were an AttributeError: JAX keeps numpy's arrays as constants of no
    device. What runs on each device stands aside here, for without jit it compiles a hundred programs."""
    arrived: list[Any] = []

    def local(_: MoeBlock, given: BlockArrays) -> BlockResult:
        arrived.append(given)
        return BlockResult(given.x, moe.RouterStats(jnp.zeros(E, jnp.int32), jnp.float32(0)), None)

    monkeypatch.setattr(MoeBlock, "run", local)
    a, roles = block_arrays(rng), octavo_jax.MeshAxes(ep="ep")
    others = {"mask": rng.random(T) < 0.8, "replay": rng.integers(-1, E, (T, CHOICES))}
    with jax.set_mesh(mesh_of(AxisType.Auto, ep=2)):
        (y, _), _ = step(a, recipe=None, sharding=roles, exchange=moe.Exchange("gather"), **others)
    assert np.array_equal(y, a["x"])
    (given,) = arrived
    assert (given.mask.shape, given.replay.shape) == ((T // 2,), (T // 2, CHOICES))


@SLOW
@pytest.mark.parametrize("way", ["gather", "ragged"])
def test_a_payload_costs_mxfp8_nothing_in_the_forward_pass(way: Any, mesh_of: Any, rng: np.random.Generator) -> None:
    """Codes of MXFP8 that travel are those that fc1 would make on arrival: y is the same bits as without a payload,
    and half the bytes of bf16 move. Inside the caller's own shard_map, with JAX's check of types."""
    a = block_arrays(rng, jnp.bfloat16)
    mesh, roles = mesh_of(ep=4), octavo_jax.MeshAxes(ep="ep")
    parameters = {name: P("ep") for name in SHAPES} | {"router": P()}

    def run(payload: Any) -> Any:
        def local(a: Arrays) -> Any:
            exchange = moe.Exchange(way, payload=payload)
            return moe.moe_mlp(
                **a, k=CHOICES, recipe=octavo.MXFP8(), backend=BACKEND, sharding=roles, exchange=exchange
            )[0]

        given = {name: one for name, one in a.items() if name != "dy"}
        whole = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(parameters,), out_specs=P("ep")))
        return whole(given), whole.lower(given).compile()

    (plain, _), (coded, program) = run(None), run(octavo.MXFP8())
    assert np.array_equal(np.asarray(plain, np.float32), np.asarray(coded, np.float32))
    if way == "gather":
        gathered = [one for one in collectives(program) if one.kind == "all-gather" and one.bytes >= a["x"].size]
        assert {array.dtype for one in gathered for array in one.results if array.bytes >= a["x"].size} == {"u8"}


@pytest.mark.parametrize("way", ["ragged", pytest.param("gather", marks=SLOW)])
def test_rows_are_a_limit_that_is_counted(way: Any, mesh_of: Any, rng: np.random.Generator) -> None:
    """With fewer rows than choices the last experts of a device lose choices, as many as `dropped` says; tokens that
    lost none have their y and a finite gradient. Every token goes to one device here, which is what rows=None allows
    for."""
    a = block_arrays(rng)
    a["x"] = a["x"].at[:, 0].set(1)
    a["router"] = a["router"].at[0].set(jnp.array([40, 35, 0, 0, -40, -40, -40, -40]))  # two experts of one device
    given = {name: one for name, one in a.items() if name != "dy"}
    y, _ = jax.jit(partial(moe.moe_mlp, k=CHOICES, recipe=None, backend=BACKEND))(**given)
    rows = T + T // 2
    run = partial(step, recipe=None, sharding=octavo_jax.MeshAxes(ep="ep"), exchange=moe.Exchange(way, rows=rows))
    with jax.set_mesh(mesh_of(ep=4)):
        (limited, stats), gradients = jax.jit(run)(a)
    assert int(stats.dropped) == T * CHOICES - rows
    assert np.asarray(stats.load).tolist() == [T, T, *[0] * (E - 2)]
    assert_sums_agree(limited[: T // 2], y[: T // 2], "y")
    assert (np.abs(np.asarray(limited - y)).max(axis=1) > 0)[T // 2 :].all()
    assert all(np.isfinite(np.asarray(one)).all() for one in jax.tree.leaves(gradients))


@pytest.mark.parametrize("mesh", [pytest.param({"dp": 2, "ep": 4}, marks=SLOW), {"idle": 2, "ep": 2, "tp": 2}])
def test_delayed_states_are_maxima_over_the_mesh(mesh: dict[str, int], mesh_of: Any, rng: np.random.Generator) -> None:
    """The state after a step, the gradient's amax included, is one device's: data axes, tp and axes without a part
    share it and each expert's entry is on its own device; JAX's sum of a shared argument's gradient would be a wrong
    one (faults.md 54)."""
    recipe = octavo.DelayedScaling(history=2)
    a = block_arrays(rng)
    given = {name: one for name, one in a.items() if name not in ("dy", "bi", "bo")}
    given["wi"] = given["wi"][..., :F]
    fresh = (octavo_jax.init_delayed(recipe, E),) * 2

    def run(state: Any, roles: Any) -> Any:
        def loss(state: Any) -> Any:
            y, _, later = moe.moe_mlp(
                **given,
                k=CHOICES,
                activation="gelu",  # tp does not cut a gate
                recipe=recipe,
                backend="jax-reference",  # whose products are float32 everywhere
                state=state,
                sharding=roles,
                weights_on="activation",
            )
            return jnp.sum(y * a["dy"]), later

        with jax.default_matmul_precision("highest"):  # the router's, which are TF32 on a GPU
            return jax.jit(jax.grad(loss, has_aux=True))(state)

    wanted = run(fresh, None)
    with jax.set_mesh(mesh_of(**mesh)):
        made = run(fresh, octavo_jax.MeshAxes(**{name: name for name in mesh if name != "idle"}))  # type: ignore[arg-type]
    for one, other in zip(jax.tree.leaves(made), jax.tree.leaves(wanted), strict=True):
        # dy of fc1 passes two float32 sums of 64 terms or fewer before its amax; 1e-5 is 168 roundings of 2^-24
        np.testing.assert_allclose(one, other, rtol=1e-5)
    assert np.asarray(made[0][0].grad.history[0]).all()


def test_what_moves(mesh_of: Any) -> None:
    """Forward and backward under remat that keeps y: tokens and their gradients are gathered once each, their sums go
    home once each; nothing else of a token's size moves, no kernel does, and no collective runs again."""
    a = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in {**SHAPES, "dy": (T, N)}.items()}
    roles = octavo_jax.MeshAxes(ep="ep")

    def kept(a: Arrays) -> Any:
        def block(given: Arrays) -> Any:
            return moe.moe_mlp(
                **given,
                k=CHOICES,
                recipe=None,
                weights_on="activation",
                output_checkpoint_names=("fc1", None),
                backend=BACKEND,
                sharding=roles,
                exchange=moe.Exchange("gather"),
            )[0]

        given = {name: one for name, one in a.items() if name not in ("dy", "bo")}
        y, pull = jax.vjp(jax.checkpoint(block, policy=save_quantized("fc1")), given)
        return y, pull(a["dy"])[0]

    mesh = mesh_of(ep=4)
    lie = {name: jax.NamedSharding(mesh, P() if name == "router" else P("ep")) for name in a}
    out = (lie["dy"], {name: one for name, one in lie.items() if name not in ("dy", "bo")})
    with jax.set_mesh(mesh):
        found = collectives(jax.jit(kept, in_shardings=(lie,), out_shardings=out).lower(a).compile())
    x_bytes, dy_bytes = T * SHAPES["x"][1] * 4, T * N * 4
    # a gather may take small arrays along, and XLA:CPU's all-to-all has an array for each device
    arrays = [(one.kind, [array.bytes for array in one.results]) for one in found]
    sent = [(kind, max(sizes) if kind == "all-gather" else sum(sizes)) for kind, sizes in arrays]
    moved = [(kind, size) for kind, size in sent if size >= dy_bytes]
    gathers, sums = [("all-gather", n) for n in (x_bytes, dy_bytes)], [("all-to-all", n) for n in (x_bytes, dy_bytes)]
    assert sorted(moved) == sorted(gathers + sums)


def test_what_a_mesh_refuses(mesh_of: Any) -> None:
    """No mesh, an axis that it lacks, lengths that do not divide, a way that the platform lacks: a sentence each."""
    a = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
    run = partial(moe.moe_mlp, k=CHOICES, recipe=None, backend=BACKEND)
    roles = octavo_jax.MeshAxes(ep="ep")
    with pytest.raises(ValueError, match=r"no mesh is in scope; call the block under jax.set_mesh\(mesh\)"):
        jax.eval_shape(partial(run, sharding=roles), **a)
    with jax.set_mesh(mesh_of(ep=2)):
        with pytest.raises(
            ValueError, match=r"x has shape \[31, 64\] and the mesh axes \['ep'\] cut its axis 0 into 2"
        ):
            jax.eval_shape(partial(run, sharding=roles), **a | {"x": a["x"][1:]})
        with pytest.raises(ValueError, match=r"x has no tokens and mesh axes \['ep'\] spread the experts; give each"):
            jax.eval_shape(partial(run, sharding=roles), **a | {"x": a["x"][:0]})
        with pytest.raises(ValueError, match="sharding names the axis 'experts' and the mesh has"):
            jax.eval_shape(partial(run, sharding=octavo_jax.MeshAxes(ep="experts")), **a)
    with jax.set_mesh(mesh_of(ep=2)), pytest.MonkeyPatch.context() as patch:
        patch.setattr(expert_parallel, "WITHOUT_RAGGED_ALL_TO_ALL", ("cpu", "cuda"))
        with pytest.raises(ValueError, match="way is 'ragged' and XLA:CPU has no ragged_all_to_all; use 'gather'"):
            jax.eval_shape(partial(run, sharding=roles, exchange=moe.Exchange("ragged")), **a)
    with jax.set_mesh(mesh_of(ep=2)):
        with pytest.raises(ValueError, match="form is 'lean' and weight_codes 'keep'; rows of a ragged exchange"):
            jax.eval_shape(partial(run, sharding=roles, exchange=moe.Exchange("ragged"), form="lean"), **a)
        routing = jax.ShapeDtypeStruct((T, CHOICES), jnp.int32), jax.ShapeDtypeStruct((T, CHOICES), jnp.float32)
        with pytest.raises(ValueError, match="weight_codes 'remake'; rows that a mesh cuts outside"):
            jax.eval_shape(
                lambda chosen, weights: moe.routed_mlp(
                    a["x"],
                    moe.arrange(chosen, weights, E),
                    a["wi"],
                    a["wo"],
                    recipe=None,
                    sharding=roles,
                    weight_codes="remake",
                ),
                *routing,
            )


@pytest.mark.parametrize("cut", ["dp", "ep"])
def test_a_derivative_inside_a_partly_manual_caller_that_checks_types(cut: str, mesh_of: Any) -> None:
    """JAX has no derivative of one shard_map inside the other there, and said so of a rule in octavo_jax. The block
    alone is fine, and so is what the sentence advises."""
    a = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
    experts = P("ep") if cut == "ep" else P()
    places = {name: experts if name in ("wi", "wo", "bi", "bo") else P() for name in SHAPES} | {"x": P(cut)}
    roles = octavo_jax.MeshAxes(dp="dp", ep="ep")

    def block(check_vma: bool, a: Arrays) -> Any:
        mapped = jax.shard_map(
            lambda a: moe.moe_mlp(**a, k=CHOICES, recipe=None, backend=BACKEND, sharding=roles)[0],
            in_specs=(places,),
            out_specs=P(cut),
            axis_names={cut},
            check_vma=check_vma,
        )
        return jnp.sum(mapped(a))

    with jax.set_mesh(mesh_of(dp=2, ep=2)):
        jax.eval_shape(partial(block, True), a)
        jax.eval_shape(jax.grad(partial(block, False)), a)
        with pytest.raises(TypeError, match=rf"manual over \['{cut}'\] and not over .* give it check_vma=False"):
            jax.eval_shape(jax.grad(partial(block, True)), a)
