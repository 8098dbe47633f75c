"""A router's logits and their gradients: products in fp32, by tensor cores on CUDA, that keep no fp32 copy of tokens.

Tests on a device are skipped where torch sees none.
"""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad, vmap

import octavo_numerics
from octavo import HighPrecision
from octavo_torch.arithmetic.parts import bf16_parts
from octavo_torch.compiler.graphs import no_waiting
from octavo_torch.moe.router import logits
from octavo_torch.moe.router.logits import drouter_by_parts, dx_by_parts, logits_by_parts, router_logits

T, K, E = 70, 144, 13
SUMMED = {"logits": K, "dx": 6 * E, "drouter": T}
"""Products that a sum has at most: six pairs of parts in dx."""
ROUTERS = [torch.bfloat16, torch.float32]
needs_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")


def draw(rng: np.random.Generator, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """Tokens in bf16, a router of `dtype`, and a gradient whose sizes differ by many powers of two."""
    dy = rng.standard_normal((T, E)) * np.exp(4 * rng.standard_normal((T, E)))
    arrays = (rng.standard_normal((T, K)), rng.standard_normal((E, K)), dy)
    dtypes = (torch.bfloat16, dtype, torch.float32)
    x, router, gradient = (torch.from_numpy(a).to(device, kind) for a, kind in zip(arrays, dtypes, strict=True))
    return x, router, gradient


def complaint(name: str, made: Tensor, left: Tensor, right: Tensor, accumulation: Any) -> str:
    """What octavo_numerics has against `made`, which is left right^T; "" if nothing."""
    k, out = SUMMED[name], {torch.float32: "float32", torch.bfloat16: "bfloat16"}[made.dtype]
    bound = octavo_numerics.error_bound(HighPrecision(), k, out_dtype=out, accumulation=accumulation)  # type: ignore[arg-type]
    sides = (torch.nn.functional.pad(side.detach().double().cpu(), (0, k - side.shape[1])) for side in (left, right))
    report = bound.check(made.detach().double().cpu(), *sides, zero_mean=False)
    return "" if report.passed else f"{name}: {report}"


@pytest.mark.parametrize("dtype", ROUTERS, ids=str)
def test_products_by_parts_are_those_of_fp32(rng: np.random.Generator, dtype: torch.dtype) -> None:
    """Three parts of 8 bits hold all 24 of an fp32 value; one part alone would be off by 2^-9."""
    x, router, dy = draw(rng, dtype)
    products = {
        "logits": (logits_by_parts(x, router), x, router),
        "dx": (dx_by_parts(dy, router), dy, router.t()),
        "drouter": (drouter_by_parts(dy, x), dy.t(), x.t()),
    }
    assert [
        found for name, (made, *sides) in products.items() if (found := complaint(name, made, *sides, "fp32"))
    ] == []


def test_what_is_not_finite_stays_where_it_is(rng: np.random.Generator) -> None:
    """An infinite weight has no second part that would make its logits NaN, and no row's values reach another row."""
    x, router, dy = draw(rng, torch.float32)
    router[3], dy[5], dy[6] = torch.inf, -torch.inf, torch.nan
    router[3, ::2] = torch.finfo(torch.float32).max  # which bf16 rounds to infinity
    made = logits_by_parts(x.abs(), router)
    assert bool((made[:, 3] == torch.inf).all())
    assert made.isfinite().all(0).tolist() == [number != 3 for number in range(E)]
    dx = dx_by_parts(dy, torch.ones(E, K))
    assert dx.isfinite().any(1).tolist() == [number not in (5, 6) for number in range(T)]


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++ and there is no g++ here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_parts_of_a_compiled_program_add_up(rng: np.random.Generator) -> None:
    """torch.compile leaves out a conversion to bf16 and back, and what was rounded off came out as 0: one part of 8
    bits was all that a compiled layer's products had."""
    values = torch.from_numpy(rng.standard_normal(1000, np.float32))
    # g++ neither tries each instruction set of this processor nor precompiles headers for one kernel
    with torch._inductor.config.patch({"cpp.vec_isa_ok": True, "cpp_cache_precompile_headers": False}):
        parts = torch.compile(bf16_parts)(values)
    assert torch.equal(sum(part.double() for part in parts), values.double())


@pytest.mark.parametrize("dtype", ROUTERS, ids=str)
def test_the_tokens_are_kept_as_they_are(rng: np.random.Generator, dtype: torch.dtype) -> None:
    """Backward needs x, which a layer keeps anyway, and no copy in fp32 of twice its bytes."""
    x, router, dy = draw(rng, dtype)
    leaves = [x.requires_grad_(), router.requires_grad_()]
    kept: list[Tensor] = []

    def keep(value: Tensor) -> Tensor:
        kept.append(value)
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        made = router_logits(x, router)
    assert {value.data_ptr() for value in kept} == {leaf.data_ptr() for leaf in leaves}
    dx, drouter = torch.autograd.grad(made, leaves, dy)
    assert (dx.dtype, drouter.dtype) == (torch.bfloat16, dtype)
    assert not complaint("logits", made, x, router, "fp32")
    assert not complaint("dx", dx, dy, router.t(), "fp32")
    assert not complaint("drouter", drouter, dy.t(), x.t(), "fp32")


@pytest.mark.parametrize("dtype", ROUTERS, ids=str)
def test_derivatives_of_the_gradients(
    rng: np.random.Generator, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A penalty on gradients, and many gradients at once: torch has a derivative neither of a product of bf16 into fp32
    nor of bits, and no rule for many at once ("Batching rule not implemented for aten::view.dtype")."""
    monkeypatch.setattr(logits, "_by_tensor_cores", lambda x, router: True)
    x, router, dy = draw(rng, dtype)
    v, u, _ = draw(rng, dtype)
    leaves = [value.requires_grad_() for value in (x, router, dy)]
    made = router_logits(x, router)
    dx, drouter = torch.autograd.grad(made, (x, router), dy, create_graph=True)
    ddy, ddrouter = torch.autograd.grad(dx, (dy, router), v, retain_graph=True)
    assert not complaint("logits", ddy, v, router, "fp32")
    assert not complaint("drouter", ddrouter, dy.t(), v.t(), "fp32")
    ddy, ddx = torch.autograd.grad(drouter, (dy, x), u)
    assert not complaint("logits", ddy, x, u, "fp32")
    assert not complaint("dx", ddx, dy, u.t(), "fp32")
    many = torch.stack([dy.detach(), -dy.detach()])
    dxs, drouters = torch.autograd.grad(router_logits(x, router), leaves[:2], many, is_grads_batched=True)
    for gradient, dx, drouter in zip(many, dxs, drouters, strict=True):
        assert not complaint("dx", dx, gradient, router.t(), "fp32")
        assert not complaint("drouter", drouter, gradient.t(), x.t(), "fp32")


def test_functional_gradients_in_autocast(rng: np.random.Generator) -> None:
    """torch.func.grad inside of autocast, whose backward runs there, too: the bits of a backward outside. So with its
    derivative, and in a batch of routers' tokens."""
    x, router, dy = torch.randn(T, K), torch.randn(E, K), torch.randn(T, E)

    def loss(x: Tensor, router: Tensor) -> Tensor:
        return (router_logits(x, router) * dy).sum()

    def penalty(x: Tensor, router: Tensor) -> Tensor:
        return sum((value.square().sum() for value in grad(loss, (0, 1))(x, router)), start=torch.zeros(()))

    def batched(x: Tensor, router: Tensor) -> Tensor:
        return (vmap(router_logits, (0, None))(x[None], router) * dy).sum()

    for function in (loss, penalty, batched):
        made = grad(function, (0, 1))
        with torch.autocast("cpu", torch.bfloat16):
            inside = made(x, router)
        assert all(map(torch.equal, inside, made(x, router)))
    leaves = [value.clone().requires_grad_() for value in (x, router)]
    assert all(map(torch.equal, grad(loss, (0, 1))(x, router), torch.autograd.grad(loss(*leaves), leaves)))


@pytest.mark.parametrize("dtype", ROUTERS, ids=str)
def test_products_on_a_device_are_of_bf16(
    rng: np.random.Generator, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products of fp32 took a tenth of a layer's time there, or were TF32 where the process had allowed that. Tokens of
    other dtypes have no parts that would pay, and chips before sm_80 no such tensor cores."""
    for arch, chosen in (((9, 0), [torch.bfloat16]), ((7, 5), [])):
        monkeypatch.setattr(logits, "arch_of", lambda device, arch=arch: arch)
        with FakeTensorMode():
            fake = {kind: torch.empty(16, 16, dtype=kind, device="cuda") for kind in (torch.float16, *ROUTERS)}
            assert [kind for kind in fake if logits._by_tensor_cores(fake[kind], fake[dtype])] == chosen
            assert not logits._by_tensor_cores(fake[torch.bfloat16], fake[torch.float16])
            nobody = torch.empty(0, 16, dtype=torch.bfloat16, device="cuda")
            assert not logits._by_tensor_cores(nobody, fake[dtype])
    x, router, dy = draw(rng, dtype)
    assert not logits._by_tensor_cores(x, router)
    multiplied: list[torch.dtype] = []

    def watched(left: Tensor, right: Tensor) -> Tensor:
        multiplied.extend((left.dtype, right.dtype))
        return left.float() @ right.float()

    monkeypatch.setattr(logits, "_by_tensor_cores", lambda x, router: True)
    monkeypatch.setattr(logits, "_sums", watched)
    made = router_logits(x.requires_grad_(), router.requires_grad_())
    torch.autograd.grad(made, (x, router), dy)
    assert multiplied == [torch.bfloat16] * 6


@needs_device
@pytest.mark.parametrize("dtype", ROUTERS, ids=str)
def test_on_a_device_as_exact_whatever_torch_allows(rng: np.random.Generator, dtype: torch.dtype) -> None:
    """TF32 has 11 bits, of a router's weights and of the logits' gradient; no flag of torch's changes a bit here, and
    nobody waits (faults.md 36)."""
    x, router, dy = draw(rng, dtype, "cuda")
    leaves = [x.requires_grad_(), router.requires_grad_()]
    before = torch.get_float32_matmul_precision()
    results = []
    try:
        for allowed in ("highest", "high"):
            torch.set_float32_matmul_precision(allowed)
            torch.cuda.synchronize()
            with no_waiting():
                made = router_logits(x, router)
                results.append([made, *torch.autograd.grad(made, leaves, dy)])
    finally:
        torch.set_float32_matmul_precision(before)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))
    made, dx, drouter = results[0]
    assert not complaint("logits", made, x, router, "hopper_bf16")
    assert not complaint("dx", dx, dy, router.t(), "hopper_bf16")
    assert not complaint("drouter", drouter, dy.t(), x.t(), "hopper_bf16")
