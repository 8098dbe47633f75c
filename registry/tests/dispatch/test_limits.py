"""A GEMM within a limit of multiprocessors: the backend's own function, or an error; never the whole device."""

from __future__ import annotations

from typing import Any

import pytest

from octavo import OctavoError
from octavo_registry.dispatch.limits import within


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_limit_comes_from_the_backend_or_is_refused(fakes: Any, framework: str) -> None:
    """All multiprocessors but those that are left; both numbers, or the backend, in the sentence."""

    def planned(**parts: Any) -> Any:
        answer = fakes.bound("dgrad", **parts)
        made = fakes.registry(fakes.plugin(backend=fakes.Backend(answer), rows=[fakes.row(framework=framework)]))
        return made.plan(fakes.request(op="dgrad", framework=framework))

    def limited(most: int) -> Any:
        return f"on {most}"

    plan = planned(limited=limited)
    assert within(plan, 16, 132, "cuda:1") == "on 116"
    assert within(plan, 131, 132, "cuda:1") == "on 1"
    for left in (132, 133):
        with pytest.raises(ValueError, match=f"room leaves {left} multiprocessors to others and cuda:1 has 132; leave"):
            within(plan, left, 132, "cuda:1")
    with pytest.raises(OctavoError, match=f"a has no limit for its dgrad; .*, such as {framework}-native"):
        within(planned(), 16, 132, "cuda:1")
