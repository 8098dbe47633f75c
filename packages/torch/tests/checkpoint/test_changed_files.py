"""Checkpoint files whose contents were changed, with digests that fit: nothing of them is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import arrays, metadata, write
from torch import Tensor, nn

from octavo import MXFP8
from octavo_torch import GroupedMLP, load_checkpoint, save_checkpoint

Said = dict[str, Any]


def made() -> nn.Module:
    """A module with one layer of interleaved experts."""
    return nn.ModuleDict({"mlp": GroupedMLP(2, 32, 32, recipe=MXFP8(), dtype=torch.bfloat16, interleave=8)})


def other_version(said: Said, saved: dict[str, Tensor]) -> None:
    said["version"] = 99


def one_array_less(said: Said, saved: dict[str, Tensor]) -> None:
    del saved["mlp.weight2.rowwise_scale"]


def another_name(said: Said, saved: dict[str, Tensor]) -> None:
    said["weights"]["mlp.weight3"] = said["weights"].pop("mlp.weight2")


def another_recipe(said: Said, saved: dict[str, Tensor]) -> None:
    said["recipes"]["mlp"]["recipe"]["gradient_format"] = "e5m2"


def no_recipe(said: Said, saved: dict[str, Tensor]) -> None:
    said["recipes"]["mlp"]["recipe"] = {"kind": "nonsense"}


def another_interleave(said: Said, saved: dict[str, Tensor]) -> None:
    said["weights"]["mlp.weight1"]["interleave"] = 16


def no_spec(said: Said, saved: dict[str, Tensor]) -> None:
    del said["weights"]["mlp.weight1"]["spec"]["quantizer"]


def another_shape(said: Said, saved: dict[str, Tensor]) -> None:
    said["weights"]["mlp.weight1"]["spec"]["shape"][1] *= 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_version, "has version 99 and this octavo-torch reads 1; install the one that wrote it"),
        (one_array_less, r"its own list of arrays differ in \['mlp.weight2.rowwise_scale'\]; copy or save it again"),
        (another_name, "codes of mlp.weight3, and here no grouped layer has a parameter of this name .*; create"),
        (another_recipe, "recipe of 'mlp' has fingerprint .*: it was changed after it was saved"),
        (no_recipe, "recipe of 'mlp' cannot be read: .*; save it again"),
        (another_interleave, "mlp.weight1 was saved with interleave=16 and has 8 here; create it with 16"),
        (no_spec, "description of mlp.weight1 cannot be read: .*; save it again"),
        (another_shape, r"mlp.weight1.rowwise is torch.float8_e4m3fn .* in the checkpoint, and its spec says"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(
    change: Callable[[Said, dict[str, Tensor]], None], message: str, tmp_path: Path
) -> None:
    """By what is wrong, before anything is loaded."""
    path, module = tmp_path / "model.safetensors", made()
    save_checkpoint(made(), path, quantized=True)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    saved, said = arrays(path), metadata(path)
    change(said, saved)
    write(path, saved, said)
    with pytest.raises(ValueError, match=message) as refused:
        load_checkpoint(module, path)
    assert "\n" not in str(refused.value)
    assert {name: value.tolist() for name, value in module.state_dict().items()} == {
        name: value.tolist() for name, value in before.items()
    }


def test_a_module_whose_state_is_no_tensor_is_refused(tmp_path: Path) -> None:
    """A file holds tensors, so that nothing in it can be executed."""

    class Counted(nn.Module):
        def get_extra_state(self) -> int:
            return 3

        def set_extra_state(self, state: object) -> None: ...

    with pytest.raises(ValueError, match="_extra_state is a int in the state dict; a checkpoint holds tensors only"):
        save_checkpoint(nn.ModuleList([made(), Counted()]), tmp_path / "model.safetensors")
