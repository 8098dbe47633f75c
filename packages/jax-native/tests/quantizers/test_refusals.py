"""What the machine, the build or the caller gets wrong is said in a sentence, and costs nothing else."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest

import octavo_jax
import octavo_native
import octavo_registry
from octavo import QuantizerSpec
from octavo_jax_native.backend import NativeBackend
from octavo_jax_native.ffi import targets
from octavo_registry import Request

BLOCK = QuantizerSpec(format="e4m3", scaling="block")
DELAYED = QuantizerSpec(format="e4m3", scaling="delayed")
NVFP4 = QuantizerSpec(format="e2m1", scaling="nvfp4", rounding="stochastic")


def _request(**fields: Any) -> Request:
    return Request(
        **{
            "op": "quantize",
            "framework": "jax",
            "device": "cpu",
            "in_dtype": "float32",
            "out_dtype": "float32",
            "quantizer": BLOCK,
            **fields,
        }
    )


def test_another_abi_level_is_refused_with_both_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is registered, so a kernel of another level is never called."""
    monkeypatch.setattr(octavo_native, "ABI_LEVEL", 7)
    monkeypatch.setattr(targets, "register", lambda: pytest.fail("registered"))
    refusal = NativeBackend().refuses(_request())
    assert refusal is not None
    assert f"ABI level 7 and octavo-jax-native calls level {targets.ABI_LEVEL}" in refusal


def test_an_old_jaxlib_is_refused_with_both_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """A jaxlib before XLA FFI 0.1 would fail to start with these handlers."""
    monkeypatch.setattr(jaxlib.version, "__version_info__", (0, 5, 3))
    monkeypatch.setattr(jaxlib.version, "__version__", "0.5.3")
    assert "jaxlib is 0.5.3, the kernels need 0.6.2" in (targets.refusal() or "")


def test_a_build_for_the_cpu_alone_is_refused_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason names the way to a build with CUDA kernels."""
    monkeypatch.setattr(octavo_native, "HAS_CUDA", False)
    backend = NativeBackend()
    assert "built without CUDA kernels" in (backend.refuses(_request(device="cuda", arch=(9, 0))) or "")
    assert backend.refuses(_request()) is None


@pytest.mark.parametrize(
    ("layouts", "orientation", "refused"),
    [
        (("panels", "plain"), "both", "produces rowwise data in layouts plain or rows; panels was requested"),
        (("plain", "rows"), "both", "produces columnwise data in layouts plain or panels; rows was requested"),
        (("plain", "rows"), "rowwise", None),
        (("rows", "panels"), "both", None),
    ],
)
def test_layouts_of_the_other_direction_are_refused(
    layouts: tuple[str, str], orientation: str, refused: str | None
) -> None:
    """A plane that is not made may have any layout."""
    spec = QuantizerSpec(**{**dict(BLOCK), "orientation": orientation})
    reason = NativeBackend().refuses(_request(quantizer=spec, layouts=layouts))
    assert (reason is None) if refused is None else (refused in (reason or "")), reason


def test_a_second_registration_is_harmless() -> None:
    """By a second backend object, and by XLA itself, which compares the handlers."""
    NativeBackend()
    NativeBackend()
    capsule = octavo_native.ffi_targets()["cpu"][targets.PLAN]
    jax.ffi.register_ffi_target(targets.PLAN, capsule, platform="cpu", api_version=1)


def test_targets_are_exactly_those_of_the_build() -> None:
    """TARGETS is what users allow in `jax.export`, so it may lack none."""
    table = octavo_native.ffi_targets()
    assert set(table) == ({"cpu", "CUDA"} if octavo_native.HAS_CUDA else {"cpu"})
    for handlers in table.values():
        assert set(handlers) == set(targets.TARGETS)


X, SIZES = jnp.ones((8, 32)), jnp.array([3, 5])


@pytest.mark.parametrize(
    ("spec", "changes", "message"),
    [
        (BLOCK, {"x": np.ones((8, 32), np.float32)}, "x is a ndarray"),
        (BLOCK, {"x": jnp.ones((8, 32), jnp.int32)}, "x has dtype int32"),
        (BLOCK, {"x": jnp.ones(8)}, r"x has shape \[8\]"),
        (BLOCK, {"x": jnp.ones((2, 8, 32))}, r"x has shape \[2, 8, 32\]"),
        (BLOCK, {"group_sizes": [3, 5]}, "group_sizes is a list"),
        (BLOCK, {"group_sizes": jnp.ones((2, 2), jnp.int32)}, r"group_sizes has shape \[2, 2\]"),
        (BLOCK, {"group_sizes": jnp.ones(2)}, "group_sizes has shape .* dtype float32"),
        (BLOCK, {"group_sizes": jnp.zeros(0, jnp.int32)}, r"group_sizes has shape \[0\]"),
        (BLOCK, {"out": X}, "out was given"),
        (BLOCK, {"x": jnp.ones((2, 0, 32)), "group_sizes": None}, r"x has shape \[2, 0, 32\]"),
        (DELAYED, {}, "scale is None"),
        (DELAYED, {"scale": jnp.ones(3)}, r"scale has shape \[3\] and dtype float32; it must have shape \[2\]"),
        (DELAYED, {"scale": jnp.ones(2, jnp.bfloat16)}, "scale has shape .* dtype bfloat16"),
        (NVFP4, {}, "seed is None"),
        (NVFP4, {"seed": jnp.ones(3, jnp.uint32)}, r"seed has shape \[3\]"),
        (NVFP4, {"seed": 1, "group_offset": jnp.ones(2)}, r"group_offset has shape \[2\]"),
    ],
)
def test_arguments_are_refused_by_name(spec: QuantizerSpec, changes: dict[str, Any], message: str) -> None:
    """At the Python edge, before anything is traced (issue: bad input)."""
    arguments = {"x": X, "group_sizes": SIZES, **changes}
    run = octavo_registry.plan(_request(quantizer=spec), backend="jax-native").run
    with pytest.raises(ValueError, match=message):
        run(arguments.pop("x"), arguments.pop("group_sizes"), **arguments)


def test_planes_that_do_not_fit_are_refused_by_dequantize() -> None:
    """A plane that was not made, and one of another shape or dtype than the spec says."""
    plan = octavo_registry.plan(_request(op="dequantize"), backend="jax-native")
    q = octavo_jax.quantize(X, QuantizerSpec(**{**dict(BLOCK), "orientation": "rowwise"}), SIZES, backend="jax-native")
    with pytest.raises(ValueError, match="columnwise plane was not made"):
        plan.run(q, "columnwise")
    wrong = octavo_jax.GroupedTensor(q.spec, q.group_sizes, q.rowwise, jnp.ones((8, 2)))
    with pytest.raises(ValueError, match=r"rowwise_scale has shape \[8, 2\] .* must have shape \[8, 1\]"):
        plan.run(wrong)
    with pytest.raises(ValueError, match=r"group_sizes has shape \[3\] and the tensor's spec 2 groups"):
        plan.run(dataclasses.replace(q, group_sizes=jnp.array([3, 2, 1])))


def test_a_broken_build_is_a_verdict(tmp_path: Any) -> None:
    """Kernels that do not load leave the other backends alive (architecture: a broken plugin is recorded)."""
    (tmp_path / "octavo_native").mkdir()
    (tmp_path / "octavo_native" / "__init__.py").write_text("raise ImportError('undefined symbol: octavo')\n")
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r});"
        "import jax.numpy as jnp, octavo, octavo_jax;"
        "spec = octavo.QuantizerSpec(format='e4m3', scaling='block');"
        "print(octavo_jax.quantize(jnp.ones((2, 4)), spec, backend=['jax-native', 'jax-reference']).rowwise.shape)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "(2, 4)"
