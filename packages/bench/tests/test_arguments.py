"""`octavo bench`: what is wrong is one line that names the option, and nothing heavy is imported for help."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo import PRESETS
from octavo.recipe_base import GEMMS
from octavo_bench.errors import InputError
from octavo_bench.harness.benchmark import Benchmark
from octavo_bench.harness.checks import check_installed, check_output
from octavo_bench.harness.perform import recorded_command
from octavo_bench.harness.recipes import KINDS, family_of, gemms_of_recipe, names_of_recipes, recipe_of
from octavo_bench.quantize.case import chosen_cases
from octavo_registry.cli.errors import BadInput

COMMANDS = ("quantize", "gemm", "step", "tiles", "host", "mlp", "moe", "remat", "ep")

OTHERS = [
    (["gemm", "--shape", "8,4096,28672"], "G,K,N,M"),
    (["gemm", "--shape", "8,4096,28671,16"], "multiples of 16"),
    (["gemm", "--shape", "2000,64,64,16"], "G is 1 to 1024"),
    (["gemm", "--shape", "2,64,64,16", "--shape", "2,64,64,16"], "names 2,64,64,16 twice"),
    (["gemm", "--ops", "fprob"], "--ops names 'fprob'"),
    (["gemm", "--kinds", "fp8"], "--recipes names 'fp8': recipe: got 'fp8'"),
    (["gemm", "--sizes", "uneven"], "--sizes names 'uneven'"),
    (["gemm", "--framework", "flax"], "'torch' or 'jax'"),
    (["gemm", "--device", "tpu"], "'cpu' or 'cuda'"),
    (["gemm", "--repeats", "0"], "--repeats is 0"),
    (["step", "--seed", "-1"], "--seed is -1"),
    (["step", "--framework", "jax", "--reuse-weights"], "--reuse-weights is torch's"),
    (["step", "--kinds", "block,block"], "'block' twice"),
    (["step", "--recipes", "fp8-block,block"], "'block' twice"),
    (["ep", "--recipes", "mxfp8,mxfp8"], "--recipes names 'mxfp8' twice"),
    (["ep", "--choices", "0"], "--choices is 0"),
    (["ep", "--devices", "0"], "--devices is 0"),
    (["ep", "--slack", "nan"], "--slack is nan"),
    (["step", "--framework", "torch,flax"], "--framework names 'flax'"),
    (["step", "--framework", "torch,jax", "--backend", "torch-native"], "--backend names backends of one framework"),
    (["gemm", "--backend", "torch-nativ"], "there is no backend 'torch-nativ'; known names are "),
    (["ep", "--backend", ","], "backend: got no name"),
    (["remat", "--layers", "0"], "--layers is 0"),
    (["tiles", "--ops", "quantize"], "--ops names 'quantize'"),
]

TABLE = [
    (["--recipes", "mxfp9"], "mxfp9"),
    (["--recipes", "block,block"], "twice"),
    (["--recipes", "fp8-block,block"], "'block' twice"),
    (["--recipes", "bf16"], "'bf16', which quantizes nothing"),
    (["--shapes", "32768"], "ROWSxCOLUMNS"),
    (["--shapes", "64x17"], "multiple of 16"),
    (["--groups", "0"], "--groups is 0"),
    (["--ragged-groups", "-2"], "--ragged-groups is -2"),
    (["--repeats", "0"], "--repeats is 0"),
    (["--dtype", "fp8"], "'bf16', 'fp16' or 'fp32'"),
    (["--device", "tpu"], "'cpu' or 'cuda'"),
    (["--seed", "-1"], "--seed is -1"),
    (["--groups", "many"], "--groups"),
]


ALL = [*((["quantize", *arguments], named) for arguments, named in TABLE), *OTHERS]


@pytest.mark.parametrize(("arguments", "named"), ALL, ids=[" ".join(row[0]) for row in ALL])
def test_a_wrong_argument_is_one_line_and_exit_code_2(
    arguments: list[str], named: str, tmp_path: Path, run: Any
) -> None:
    """Before anything is written."""
    result = run("bench", *arguments, "--output", str(tmp_path / "out.json"))
    assert result.code == 2, result.err
    assert named in result.err
    assert len(result.err.strip().splitlines()) == 1, result.err
    assert not list(tmp_path.iterdir())


def test_help_lists_the_subcommands(run: Any) -> None:
    """`octavo bench` is a group: what it times has a name of its own."""
    result = run("bench", "--help")
    assert result.code == 0, result.err
    assert [name for name in COMMANDS if name in result.out] == list(COMMANDS)


def test_the_command_imports_no_framework() -> None:
    """`octavo --help` and the checks of arguments stay quick."""
    code = "import sys, octavo_bench.command; print([m for m in ('torch', 'numpy', 'jax') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"


def test_what_is_missing_is_said_with_the_command_that_installs_it() -> None:
    """Without the plugin nothing can be timed."""
    check_installed("quantize", ("octavo_bench",), "octavo-torch-native")
    with pytest.raises(InputError, match=r"bench gemm needs octavo-absent, .*clone .*pip install .*/torch-native$"):
        check_installed("gemm", ("octavo_bench", "octavo_absent"), "octavo-torch-native")


@pytest.mark.parametrize(
    ("given", "recorded"),
    [
        (["--output", "/data/runs/a.json", "--quick"], "octavo bench gemm --output a.json --quick"),
        (["--output=/data/runs/a.json"], "octavo bench gemm --output=a.json"),
        (["--seed", "3", "--output", "a b.json"], "octavo bench gemm --seed 3 --output 'a b.json'"),
        (["--json"], "octavo bench gemm --json"),
        (["--goals", "/data/goals/h200.toml"], "octavo bench gemm --goals h200.toml"),
    ],
)
def test_a_recorded_command_names_a_file_without_its_folders(given: list[str], recorded: str) -> None:
    """Result files are published: where they were written on one machine is nobody's business."""
    assert recorded_command(["bench", "gemm", *given]) == recorded


def test_an_output_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    """A folder, a file in a folder that is not there, and one where nothing can be written. Nothing is left behind."""
    check_output(None)
    check_output(tmp_path / "new.json")
    assert not list(tmp_path.iterdir())
    with pytest.raises(BadInput, match="this is a folder"):
        check_output(tmp_path)
    with pytest.raises(BadInput, match="there is no folder"):
        check_output(tmp_path / "absent" / "new.json")
    with pytest.raises(BadInput, match=r"--output /proc/a.json: nothing can be written in /proc"):
        check_output(Path("/proc/a.json"))


def test_a_run_whose_file_cannot_be_written_ends_before_it_measures(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The results of a minute on a GPU are not lost for a path."""

    def rows(*_: Any) -> Any:
        raise AssertionError("measured")

    monkeypatch.setattr(Benchmark, "rows", rows)
    result = run("bench", "step", "--quick", "--output", "/proc/a.json")
    assert result.code == 2
    assert result.err.startswith("octavo: --output /proc/a.json: nothing can be written in /proc")


def test_the_bare_command_says_what_is_missing(run: Any) -> None:
    """One line, as every other wrong call."""
    result = run("bench")
    assert (result.code, result.out) == (2, "")
    assert result.err == "octavo: Missing command; try `octavo bench --help`\n"


def test_recipes_have_one_vocabulary() -> None:
    """Presets and kinds are known to every benchmark; a preset that is a kind's defaults has the kind's name."""
    assert names_of_recipes("--recipes", "") == KINDS
    assert names_of_recipes("--recipes", "bf16,fp8-block,fp8-row,mxfp8") == ("bf16", "block", "row", "mxfp8")
    assert names_of_recipes("--recipes", "high_precision") == ("bf16",)
    assert [names_of_recipes("--recipes", name) for name in PRESETS]
    assert recipe_of("mxfp8-square") == PRESETS["mxfp8-square"]
    assert (family_of("mxfp8-square"), family_of("mxfp8-folded"), family_of("bf16")) == ("mxfp8", "block", "bf16")
    assert PRESETS["fp8-row-wgrad-high-precision"].computed_as.kind == "row"  # what it remembers is no field of another
    fast = recipe_of("fp8-row-wgrad-high-precision", fast=True)
    assert (fast.wgrad, fast.fast_accumulation) == ("high_precision", frozenset(GEMMS))
    assert gemms_of_recipe("fp8-row-wgrad-high-precision", GEMMS) == ("fprop", "dgrad")
    assert {case.recipe for case in chosen_cases("fp8-block")} == {None, "block"}
