"""Bad input: one line on stderr that names the argument, the right exit code, and nothing written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from octavo_cli.errors import InputError, RunError
from octavo_cli.train.config import TrainConfig, parse_recipes, pick_framework
from octavo_cli.train.report.output import output_folder

TABLE = [
    (["--recipes", "mxfp9"], "mxfp9"),
    (["--recipes", ","], "--recipes is empty"),
    (["--recipes", "mxfp8,mxfp8"], "twice"),
    (["--recipes", "missing.toml"], "missing.toml"),
    (["--framework", "tensorflow"], "torch or jax"),
    (["--device", "tpu9"], "tpu9"),
    (["--steps", "0"], "--steps is 0"),
    (["--steps", "-3"], "--steps is -3"),
    (["--steps", "many"], "--steps"),
    (["--seed", "-1"], "--seed is -1"),
    (["--seeds", "0"], "--seeds is 0"),
    (["--experts", "0"], "--experts is 0"),
    (["--experts", "2", "--top-k", "3"], "--top-k is 3 and --experts is 2"),
    (["--top-k", "0"], "--top-k is 0"),
    (["--width", "100"], "multiple of 32"),
    (["--layers", "0"], "--layers is 0"),
    (["--text", "no-such-file.txt"], "no-such-file.txt"),
    (["--text", "."], "cannot be read"),
    (["--text", "tiny.txt"], "needs at least"),
    (["--out", "tiny.txt"], "name a folder"),
    (["--out", "tiny.txt/below"], "cannot be written"),
]


@pytest.mark.parametrize(("arguments", "named"), TABLE, ids=[" ".join(row[0]) for row in TABLE])
def test_a_wrong_argument_is_one_line_and_exit_code_2(
    arguments: list[str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Any
) -> None:
    """The line names what is wrong; no traceback, no output folder, no temporary one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.txt").write_text("too short to learn from")
    before = sorted(tmp_path.iterdir())
    result = run("train", "--quick", *arguments)
    assert result.code == 2, result.err
    assert named in result.err
    assert len(result.err.strip().splitlines()) == 1, result.err
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_to_is_refused_before_the_work(tmp_path: Path) -> None:
    """Not after two minutes of training."""
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    for target in (locked, locked / "new"):
        with pytest.raises(InputError, match="cannot be written to"), output_folder(target):
            pytest.fail("the block ran")


def test_an_absent_framework_says_what_to_install() -> None:
    """Asked for or not."""
    with pytest.raises(InputError, match=r"in a clone of Octavo run: pip install .*\./packages/jax$"):
        pick_framework("jax", ["torch"])
    with pytest.raises(InputError, match=r"no framework is installed; for torch, .*/torch; or, for jax, .*/jax$"):
        pick_framework(None, [])
    assert pick_framework(None, ["jax"]) == "jax"
    assert pick_framework(None, ["jax", "torch"]) == "torch"


def test_the_baseline_always_runs_first() -> None:
    """Every gap is measured against it."""
    assert list(parse_recipes("mxfp8,nvfp4")) == ["bf16", "mxfp8", "nvfp4"]
    assert list(parse_recipes("mxfp8,bf16")) == ["bf16", "mxfp8"]


def test_a_recipe_file_is_a_recipe(tmp_path: Path) -> None:
    """By path, beside preset names."""
    path = tmp_path / "mine.toml"
    path.write_text('kind = "mxfp8"\nwgrad = "high_precision"\n')
    assert parse_recipes(str(path))[str(path)].to_json().count('"wgrad":"high_precision"') == 1


def test_evaluations_end_with_the_last_step() -> None:
    """However few steps there are."""
    assert TrainConfig(steps=80, evaluations=4).evaluation_steps == (20, 40, 60, 80)
    assert TrainConfig(steps=3, evaluations=8).evaluation_steps == (1, 2, 3)
    assert TrainConfig(steps=1).evaluation_steps == (1,)


def _fail_half_way(target: Path) -> None:
    with output_folder(target) as folder:
        (folder / "index.html").write_text("half")
        raise RunError("failed in the middle")


def test_nothing_is_left_where_the_work_fails(tmp_path: Path) -> None:
    """New folder or old one: after an exception the target is as it was."""
    old = tmp_path / "old"
    old.mkdir()
    (old / "index.html").write_text("before")
    for target in (old, tmp_path / "new"):
        with pytest.raises(RunError):
            _fail_half_way(target)
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert [path.read_text() for path in old.iterdir()] == ["before"]


def test_files_of_others_stay(tmp_path: Path) -> None:
    """An existing folder keeps what is not ours."""
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "index.html").write_text("before")
    with output_folder(tmp_path) as folder:
        (folder / "index.html").write_text("after")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"mine.txt": "mine", "index.html": "after"}
