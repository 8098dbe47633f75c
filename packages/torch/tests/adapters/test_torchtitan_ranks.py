"""torchtitan's routed experts as one moe_mlp over ranks: its layers, its meshes, its FSDP."""

from __future__ import annotations

import secrets
from importlib.util import find_spec
from typing import Any

import pytest
from ranks import WORLD, Ranks
from titan_work import trains

pytestmark = [
    pytest.mark.skipif(
        find_spec("torchtitan") is None, reason="torchtitan is not installed; `nox -s adapters` installs it"
    ),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of torch's own, which torchtitan imports
]


def fresh() -> int:
    seed = secrets.randbits(24)
    print(f"seed {seed}")
    return seed


@pytest.mark.parametrize("spmd_backend", ["partial_dtensor", "spmd_types"])
@pytest.mark.parametrize("kind", [{"shared": True}, {"gpt_oss": True}], ids=["shared expert", "gpt-oss"])
def test_gradients_are_those_of_one_process(spmd_backend: str, kind: dict[str, Any], ranks: Ranks) -> None:
    """torchtitan's layer."""
    assert ranks(trains, fresh(), {"recipe": "mxfp8"}, spmd_backend, kind) == [[]] * WORLD
