"""octavo inspect: the definition's numbers of each tensor, and one line for what is no checkpoint."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import octavo
import octavo_numerics
from octavo_cli.inspection.files import open_source
from octavo_cli.inspection.study import sample_of, study

RECIPES = "fp8-current,fp8-block,mxfp8,nvfp4"


@pytest.fixture
def experts(seed: int) -> np.ndarray:
    """Four experts of very different magnitudes, bf16."""
    values = np.random.default_rng(seed).standard_normal((4, 130, 96)) * np.array([1, 1e-3, 20, 0.1])[:, None, None]
    return values.astype(ml_dtypes.bfloat16)


@pytest.fixture
def checkpoint(tmp_path: Path, experts: np.ndarray) -> Path:
    """A file with matrices, a vector, integers, and a matrix with values that are not finite."""
    bad = np.ones((5, 32), np.float32)
    bad[3, 7], bad[4, 0] = np.inf, np.nan
    path = tmp_path / "model.safetensors"
    save_file(
        {"experts.w": experts, "bad": bad, "norm": np.ones(7, np.float32), "ids": np.ones((2, 3), np.int64)}, path
    )
    return path


def test_every_number_is_the_definitions(checkpoint: Path, experts: np.ndarray, run: Any) -> None:
    """By expert and in total, with amax and the histogram of scales; and where values stop being finite."""
    result = run("inspect", str(checkpoint), "--recipes", RECIPES, "--rows", "0", "--json")
    assert result.code == 0, result.err
    tensors = {item["name"]: item for item in result.json["tensors"]}
    assert list(tensors) == ["bad", "experts.w", "ids", "norm"]
    found = tensors["experts.w"]
    assert (found["shape"], found["dtype"], found["experts"]) == ([4, 130, 96], "bfloat16", 4)
    wide = np.abs(experts.astype(np.float64)).max(axis=(1, 2))
    assert found["amax"] == pytest.approx(wide.tolist(), rel=1e-5)
    for name in RECIPES.split(","):
        spec = octavo.recipe(name).quantizer("w")
        assert spec is not None
        stats = octavo_numerics.tensor_stats(experts, spec)
        counted = found["recipes"][name]
        for expert, numbers in enumerate(counted["experts"]):
            assert numbers["sqnr_db"] == pytest.approx(float(stats.sqnr_db[expert]), rel=1e-5)
            assert numbers["underflow"] == pytest.approx(
                float(stats.underflow[expert] / stats.elements[expert]), rel=1e-5
            )
        assert counted["total"]["sqnr_db"] == pytest.approx(float(stats.total().sqnr_db[0]), rel=1e-5)
        assert {int(key): count for key, count in counted["scale_exponents"].items()} == stats.exponents()
    assert (tensors["bad"]["non_finite"], tensors["bad"]["first_non_finite"]) == (2, [3, 7])
    assert tensors["ids"]["skipped"] == "no quantizer takes int64"
    assert tensors["norm"]["skipped"] == "a vector or a scalar"


def test_a_sample_keeps_the_scales_of_whole_experts(seed: int) -> None:
    """The window with the largest magnitude is always among the rows, so a scale over an expert is that of all rows."""
    values = np.random.default_rng(seed).standard_normal((3, 1000, 32)).astype(np.float32)
    values[1, 997, 3] = 50
    sample = sample_of(values, 256)
    assert sample.shape == (3, 256, 32)
    assert np.abs(sample).max(axis=(1, 2)).tolist() == np.abs(values).max(axis=(1, 2)).tolist()
    assert sample_of(values, 0) is values
    assert sample_of(values, 1000) is values
    found = study("w", values, "", {"mxfp8": octavo.recipe("mxfp8")}, 256)
    assert found.looked_at == 256
    assert max(found.amax) == 50


def test_the_table_and_the_page(checkpoint: Path, tmp_path: Path, run: Any) -> None:
    """For people: a line per tensor and recipe; a page of its own, with the worst SQNR and the value's place."""
    page = tmp_path / "page.html"
    result = run("inspect", str(checkpoint), "--recipes", "mxfp8,nvfp4", "--html", str(page))
    assert result.code == 0, result.err
    assert "2, first at [3, 7]" in result.out
    assert "at worst" in result.out
    text = page.read_text(encoding="utf-8")
    for part in ("experts.w", "2, first at [3, 7]", "Scales by their binary exponent", "<svg", "nvfp4"):
        assert part in text
    only = run("inspect", str(checkpoint), "--match", "experts.*", "--recipes", "mxfp8", "--json")
    assert [item["name"] for item in only.json["tensors"]] == ["experts.w"]


def test_npz_and_folders(tmp_path: Path, run: Any) -> None:
    """npz, and a folder of several safetensors files."""
    np.savez(tmp_path / "a.npz", w=np.ones((2, 4, 32)))
    result = run("inspect", str(tmp_path / "a.npz"), "--recipes", "mxfp8", "--json")
    assert result.json["tensors"][0]["recipes"]["mxfp8"]["experts"][0]["saturated"] == 0
    folder = tmp_path / "shards"
    folder.mkdir()
    for number in range(2):
        save_file({f"w{number}": np.ones((4, 32), np.float32)}, folder / f"{number}.safetensors")
    result = run("inspect", str(folder), "--recipes", "mxfp8", "--json")
    assert [item["name"] for item in result.json["tensors"]] == ["w0", "w1"]


def test_checkpoints_of_two_runs_are_told_apart(tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of one name in two folders, with layers of one name: by their paths, and each layer has its own recipe."""
    monkeypatch.chdir(tmp_path)
    recipes = {"first": octavo.MXFP8(), "second": octavo.NVFP4()}
    for name, recipe in recipes.items():
        (tmp_path / name).mkdir()
        header = {"recipes": {"layer": {"recipe": json.loads(recipe.to_json())}}}
        weights = {"w": np.ones((4, 32), np.float32)}
        save_file(weights, f"{name}/model.safetensors", {"octavo": f"1 {json.dumps(header)}"})
    files = [f"{name}/model.safetensors" for name in recipes]
    result = run("inspect", *files, "--recipes", "mxfp8", "--json").json
    assert [tensor["name"] for tensor in result["tensors"]] == [f"{file}: w" for file in files]
    fingerprints = {layer: entry["fingerprint"] for layer, entry in result["trained_in"].items()}
    assert fingerprints == {f"{name}/model.safetensors: layer": recipe.fingerprint for name, recipe in recipes.items()}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_checkpoints_of_octavo_torch_and_dcp(tmp_path: Path, run: Any) -> None:
    """Recipes with fingerprints; codes and scales are no values; a DCP's pickle is read only where it is trusted."""
    torch = pytest.importorskip("torch")
    from torch.distributed.checkpoint import save

    import octavo_torch

    model = octavo_torch.GroupedLinear(2, 64, 32, recipe=octavo.MXFP8(), dtype=torch.bfloat16)
    octavo_torch.save_checkpoint(model, tmp_path / "m.safetensors")
    octavo_torch.save_checkpoint(model, tmp_path / "q.safetensors", quantized=True)
    fingerprint = octavo.MXFP8().fingerprint
    result = run("inspect", str(tmp_path / "m.safetensors"), "--recipes", "mxfp8", "--json")
    assert result.json["trained_in"] == {"(the model)": {"kind": "mxfp8", "fingerprint": fingerprint}}
    assert result.json["tensors"][0]["recipes"]["mxfp8"]["total"]["sqnr_db"] > 25
    coded = run("inspect", str(tmp_path / "q.safetensors"), "--recipes", "mxfp8", "--json")
    assert {item["skipped"] for item in coded.json["tensors"]} == {"codes or scales"}
    folder = tmp_path / "dcp"
    save({**model.state_dict(), **octavo_torch.recipe_state(model)}, checkpoint_id=folder)
    refused = run("inspect", str(folder), "--recipes", "mxfp8")
    assert refused.code == 2
    assert "pickle" in refused.err
    assert "--trust" in refused.err
    result = run("inspect", str(folder), "--recipes", "mxfp8", "--trust", "--json")
    assert result.json["trained_in"]["(the model)"]["fingerprint"] == fingerprint
    assert "mxfp8" in next(item for item in result.json["tensors"] if item["name"] == "weight")["recipes"]


@pytest.mark.skipif(importlib.util.find_spec("orbax") is None, reason="orbax is not installed")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_orbax_folders(tmp_path: Path, run: Any) -> None:
    """Names are paths in the tree."""
    import jax.numpy as jnp
    import orbax.checkpoint as ocp

    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "o", {"params": {"fc1": jnp.ones((2, 8, 32), jnp.bfloat16)}})
    result = run("inspect", str(tmp_path / "o"), "--recipes", "mxfp8", "--json")
    assert result.code == 0, result.err
    assert [(item["name"], item["experts"]) for item in result.json["tensors"]] == [("params.fc1", 2)]
    assert open_source(tmp_path / "o").weight == "kn"


def test_matrices_of_jax_are_quantized_along_their_own_k(tmp_path: Path, run: Any) -> None:
    """Outputs of very different sizes: a scale per output keeps them, one across outputs would not."""
    rng = np.random.default_rng(0)
    kernel = (rng.standard_normal((2, 128, 64)) * 2.0 ** -np.arange(0, 32, 0.5)).astype(np.float32)  # [G, K, N]
    np.savez(tmp_path / "jax.npz", kernel=kernel)
    np.savez(tmp_path / "torch.npz", kernel=kernel.swapaxes(1, 2))

    def numbers(name: str, *options: str) -> Any:
        (item,) = run("inspect", str(tmp_path / name), "--recipes", "fp8-row", "--json", *options).json["tensors"]
        return item["recipes"]

    assert numbers("jax.npz", "--weight", "kn") == numbers("torch.npz")
    assert numbers("jax.npz") != numbers("torch.npz")
    refused = run("inspect", str(tmp_path / "jax.npz"), "--weight", "gkn")
    assert refused.code == 2
    assert "--weight is 'gkn'; it is nk" in refused.err


def _broken(kind: str, folder: Path) -> Path:
    path = folder / {"text": "a.txt", "folder": "f", "npz": "a.npz", "pickle": "p.npz"}.get(kind, "a.safetensors")
    if kind == "folder":
        path.mkdir()
    elif kind == "pickle":
        np.savez(path, w=np.array([{}], dtype=object))
    elif kind == "truncated":
        save_file({"w": np.ones((64, 64), np.float32)}, path)
        path.write_bytes(path.read_bytes()[:2000])
    elif kind == "metadata":
        save_file({"w": np.ones((4, 32), np.float32)}, path, {"octavo": "digest {not json"})
    elif kind != "absent":
        path.write_bytes(b"nothing of the kind")
    return path


@pytest.mark.parametrize("kind", ["absent", "text", "folder", "npz", "pickle", "safetensors", "truncated", "metadata"])
def test_what_is_no_checkpoint_is_one_line(kind: str, tmp_path: Path, run: Any) -> None:
    """Exit code 2, the path in it, and no traceback."""
    path = _broken(kind, tmp_path)
    result = run("inspect", str(path), "--recipes", "mxfp8")
    assert result.code == 2
    assert path.name in result.err
    assert len(result.err.strip().splitlines()) == 1, result.err


TABLE = [
    (["--recipes", ","], "--recipes is empty"),
    (["--recipes", "bf16"], "bf16 quantizes no weights"),
    (["--recipes", "mxfp9"], "mxfp9"),
    (["--match", "nothing*"], "--match 'nothing*'"),
    (["--rows", "-1"], "--rows is -1"),
    (["--html", "/no-such-folder/page.html"], "/no-such-folder"),
]


@pytest.mark.parametrize(("arguments", "named"), TABLE, ids=[" ".join(row[0]) for row in TABLE])
def test_a_wrong_argument_is_one_line(arguments: list[str], named: str, checkpoint: Path, run: Any) -> None:
    """Before anything is read or written."""
    result = run("inspect", str(checkpoint), *arguments)
    assert result.code == 2
    assert named in result.err
    assert len(result.err.strip().splitlines()) == 1
    told = run("inspect", str(checkpoint), *arguments, "--json")
    assert json.loads(told.err)["error"]["exit_code"] == 2


def test_values_that_mxfp4_loses_are_counted(tmp_path: Path, seed: int, run: Any) -> None:
    """By expert, as the definition counts them; nothing is said of experts and recipes without such values."""
    experts = np.random.default_rng(seed).standard_normal((2, 130, 96)).astype(np.float32)
    experts[1, 5:8] *= np.float32(2.0**-19)
    save_file({"experts.w": experts}, tmp_path / "model.safetensors")
    spec = octavo.recipe("mxfp4").quantizer("w")
    assert spec is not None
    lost = int(octavo_numerics.tensor_stats(experts, spec).inexact[1])
    arguments = ("inspect", str(tmp_path / "model.safetensors"), "--recipes", "mxfp4,fp8-block")
    found = run(*arguments, "--json").json["tensors"][0]["recipes"]
    assert [numbers.get("inexact") for numbers in found["mxfp4"]["experts"]] == [None, lost]
    assert "inexact" not in found["fp8-block"]["total"]
    assert f"experts.w: E4M3 does not hold {lost} of the values that mxfp4 rounds to." in run(*arguments).out
