"""Saving and loading where something is: files that are replaced, and models that keep what they have."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from octavo_torch import GroupedLinear, dequantize, load_checkpoint, save_checkpoint, save_distributed
from octavo_torch.linear.coded_weight import CodedWeight


def layer() -> GroupedLinear:
    return GroupedLinear(2, 32, 32, recipe="mxfp8", dtype=torch.bfloat16)


def test_an_end_in_between_leaves_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """safetensors before 0.8 empties a file that is there before it writes, as this stand-in does."""
    saved = layer()
    path = tmp_path / "model.safetensors"
    save_checkpoint(saved, path)

    def breaks_off(tensors: dict[str, Tensor], filename: str, metadata: dict[str, str]) -> None:
        Path(filename).write_bytes(safetensors.torch.save(tensors, metadata)[:100])
        raise KeyboardInterrupt

    monkeypatch.setattr(safetensors.torch, "save_file", breaks_off)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(layer(), path)
    assert [*tmp_path.iterdir()] == [path]
    loaded = layer()
    load_checkpoint(loaded, path)
    assert torch.equal(loaded.weight, saved.weight)


def test_a_folder_in_the_place_of_the_file(tmp_path: Path) -> None:
    """One line, and nothing is left behind."""
    with pytest.raises(ValueError, match=r"path is .* and cannot be written: .*; give one that can"):
        save_checkpoint(layer(), tmp_path)
    assert not [*tmp_path.iterdir()]
    assert not [*tmp_path.parent.glob("*.part")]


def test_a_state_of_another_recipe_leaves_the_model_as_it_is(tmp_path: Path) -> None:
    """Refused with recipes="any", too, where values may be loaded: before any of them is."""
    path = tmp_path / "model.safetensors"
    save_checkpoint(GroupedLinear(2, 32, 32, recipe="fp8-delayed", dtype=torch.bfloat16), path)
    own = layer()
    before = own.weight.detach().clone()
    told = r"has \['amax_history', 'encode_scale'\], .*: the recipes' states differ; create the module with the recipe"
    with pytest.raises(ValueError, match=told):
        load_checkpoint(own, path, recipes="any")
    assert torch.equal(own.weight, before)


def test_files_of_other_ranks_are_not_left_beside_new_ones(tmp_path: Path) -> None:
    """A run goes on with fewer ranks and saves into the folder of before: files of the ranks that are gone stayed
    there, and were loaded over the new values, or under them, as the folder lists its files."""
    save_distributed(layer(), tmp_path)
    save_distributed(layer(), tmp_path)
    (file,) = tmp_path.iterdir()
    file.rename(tmp_path / file.name.replace("shard-00001", "shard-00002"))
    with pytest.raises(ValueError, match=r"folder is .* and has shard-00002-.*; give each checkpoint a folder of its"):
        save_distributed(layer(), tmp_path)
    assert len([*tmp_path.iterdir()]) == 1


def test_codes_are_no_part_of_the_file(tmp_path: Path) -> None:
    """On a CPU safetensors gives the file's own memory: whoever wrote into the file changed the weights of a model."""
    path = tmp_path / "model.safetensors"
    save_checkpoint(layer(), path, quantized=True)
    loaded = layer()
    load_checkpoint(loaded, path)
    weight = loaded.weight
    assert isinstance(weight, CodedWeight)
    before = dequantize(weight.codes)
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert torch.equal(dequantize(weight.codes), before)
