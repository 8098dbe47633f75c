"""An installed backend that cannot run is loud where an accelerator would have had it; nothing else is."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from octavo import NoBackendError
from octavo_registry import FallbackWarning, Refused, prefer

ON_A_GPU = {"device": "cuda", "arch": (9, 0)}


def registry(fakes: Any, native: Any, **card: Any) -> Any:
    """Of a reference and a backend before it, both for CPUs and GPUs."""
    rows = [fakes.row(), fakes.row(device="cuda")]
    return fakes.registry(
        fakes.plugin("reference", rows=rows, priority=-100),
        fakes.plugin("native", native, **{"rows": rows, "priority": 100, **card}),
    )


def warned(call: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call()
    assert all((each.category, each.filename) == (FallbackWarning, __file__) for each in seen)  # not a line of ours
    return [str(each.message) for each in seen]


def test_a_broken_backend_is_loud_once(fakes: Any) -> None:
    """Name, error, who serves, what it costs and how to refuse that, at the first layer and not again."""
    broken = fakes.Backend(answer=ImportError("libnative.so: cannot open shared object file"))
    made = registry(fakes, broken)
    (message,) = warned(lambda: made.plan_layer(fakes.request(**ON_A_GPU)))
    for part in (
        "backend native of (this process) cannot run here: ImportError: libnative.so: cannot open shared object file",
        "reference serves",
        "mxfp8 on cuda in its place, which is slower by an order of magnitude or more",
        "octavo_registry.prefer('native'), or OCTAVO_BACKEND=native, makes this an error",
    ):
        assert part in message
    assert warned(lambda: [made.plan_layer(fakes.request(**ON_A_GPU, k=k)) for k in (64, 128, 256)]) == []


def test_an_environment_refuses_the_replacement(fakes: Any) -> None:
    """`prefer` is a closed list: with it, or with the warning as an error, nothing runs on the reference."""
    made = registry(fakes, fakes.Backend(answer=ImportError("libnative.so")))
    with prefer("native"), pytest.raises(NoBackendError, match=r"native +broken +ImportError: libnative.so"):
        made.plan_layer(fakes.request(**ON_A_GPU))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):  # the second layer is refused as the first one was
            with pytest.raises(FallbackWarning, match="libnative"):
                made.plan_layer(fakes.request(**ON_A_GPU))


@pytest.mark.parametrize(
    ("native", "card", "asked", "loud"),
    [
        ("broken", {}, {"device": "cpu"}, False),
        ("broken", {"priority": -200}, ON_A_GPU, False),
        ("broken", {"rows": "other arch"}, ON_A_GPU, False),
        ("broken", {"rows": "jax"}, ON_A_GPU, False),
        ("refuses", {}, ON_A_GPU, False),
        ("works", {}, ON_A_GPU, False),
        ("works", {"needs": ("test-absent>=1",)}, ON_A_GPU, True),
        ("works", {"api_level": 1}, ON_A_GPU, True),
    ],
    ids=["cpu", "behind", "another chip's", "another framework's", "refuses", "works", "needs", "API level"],
)
def test_who_is_at_fault(fakes: Any, native: str, card: dict[str, Any], asked: dict[str, Any], loud: bool) -> None:
    """The installation, for a request that the backend would have served first; a refusal has its reasons elsewhere."""
    answers = {"broken": ImportError("gone"), "refuses": Refused("k is 64"), "works": None}
    rows = {
        "other arch": [fakes.row(device="cuda", min_arch=(10, 0))],
        "jax": [fakes.row(framework="jax", device="cuda")],
    }
    if "rows" in card:
        card = {**card, "rows": rows[card["rows"]]}
    made = registry(fakes, fakes.Backend(answer=answers[native]), **card)
    messages = warned(lambda: made.plan_layer(fakes.request(**asked)))
    assert len(messages) == loud
    assert all("backend native of" in message for message in messages)


def test_a_plugin_that_cannot_be_imported_is_loud(install: Any, discovered: Any, source: Any, fakes: Any) -> None:
    """It has no card: of Octavo's own the name says for which framework it would have been."""
    install("test-good", {"oct_good": source("good").replace('device="cpu"', 'device="cuda"')}, group(good="oct_good"))
    install("test-torch", {"oct_torch": "import octavo_absent"}, group(acme="oct_torch"))
    made = discovered()
    request = fakes.request(**ON_A_GPU, training=False)
    assert warned(lambda: made.plan(request)) == []  # the one that serves is no reference
    reference = source("slow").replace('device="cpu"', 'device="cuda"').replace("needs=", "priority=-100, needs=")
    install("test-slow", {"oct_slow": reference}, group(slow="oct_slow"))
    made = discovered()
    (message,) = warned(lambda: made.plan(request, backend=["slow", "*"]))
    assert "backend acme of test-torch 1.0 cannot run here: ModuleNotFoundError: No module named" in message


def group(**points: str) -> dict[str, dict[str, str]]:
    return {"octavo.backends": points}
