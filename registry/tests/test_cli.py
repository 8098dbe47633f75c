"""The `octavo` command, in process: what it prints, its JSON, its exit codes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import octavo
import octavo_registry
from octavo_registry import Registry, bridges, entry_points
from octavo_registry.cli import app, commands, notes, selftest
from octavo_registry.frameworks import Device

WHY = ["why", "fprop", "--recipe", "mxfp8", "--shape", "64,128,32,4", "--framework", "torch", "--device", "cpu"]


class Run:
    """Outcome of one invocation."""

    def __init__(self, *arguments: str) -> None:
        result = CliRunner().invoke(app, list(arguments))
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        self.code = result.exit_code
        self.out = result.stdout
        self.err = result.stderr

    @property
    def json(self) -> Any:
        """What stdout holds."""
        return json.loads(self.out)


@pytest.fixture(autouse=True)
def _only_of_this_test(monkeypatch: pytest.MonkeyPatch, fakes: Any) -> None:
    """Nothing that is installed beside the tests is seen; the registry holds one backend."""
    found = entry_points.published

    def published(group: str) -> Any:
        return tuple(entry for entry in found(group) if entry.distribution.startswith("test-"))

    monkeypatch.setattr(bridges, "published", published)
    monkeypatch.setattr(bridges, "_records", {})
    monkeypatch.setattr(commands, "published", published)
    monkeypatch.setattr(notes, "published", published)
    monkeypatch.setattr(selftest, "definition", lambda: None)
    use(monkeypatch, fakes.registry(fakes.plugin("a", priority=5), fakes.plugin("b", rows=[fakes.row(device="cuda")])))


def use(monkeypatch: pytest.MonkeyPatch, registry: Registry) -> None:
    monkeypatch.setattr(octavo_registry, "_registry", registry)


# ---- why


def test_why_shows_every_verdict_and_the_layer() -> None:
    """command.md: `why` prints every backend's verdict, and for a GEMM the composition of its layer."""
    run = Run(*WHY)
    assert run.code == 0
    assert run.err == ""
    lines = run.out.splitlines()
    assert lines[0] == "fprop in mxfp8 for torch on cpu"
    assert re.fullmatch(r"  a +chosen +\(this process\) +priority 5", lines[2])
    assert re.fullmatch(r"  b +refused +\(this process\) +serves cuda, the device is cpu", lines[3])
    assert "The layer" in lines
    assert re.search(r"^  wgrad +a +mxfp8", run.out, re.MULTILINE)


def test_why_shows_the_eager_and_the_graph_safe_choice(monkeypatch: pytest.MonkeyPatch, fakes: Any) -> None:
    """torch.md: `why` shows both plans and why one was chosen; of equal ones the request decides."""
    row = fakes.row(device="cuda")
    both = [row, row.model_copy(update={"graph_safe": True})]
    registry = fakes.registry(
        fakes.plugin("eager", rows=both, priority=5), fakes.plugin("captures", rows=both[1:], priority=5)
    )
    use(monkeypatch, registry)
    asked = [*WHY, "--device", "cuda", "--arch", "9.0"]
    expected = [
        "Eagerly: eager (priority 5; of equal ones it is made for eager calls, too)",
        "In a CUDA graph: captures (priority 5; of equal ones it is made for CUDA graphs)",
    ]
    for graph, chosen in ((False, "eager"), (True, "captures")):
        run = Run(*asked, *(["--graph"] if graph else []))
        start = run.out.splitlines().index(expected[0])
        assert run.out.splitlines()[start : start + 2] == expected
        assert re.search(rf"^  wgrad +{chosen} +mxfp8", run.out, re.MULTILINE)
    assert Run(*asked, "--json").json["ways"] == {"eager": "eager", "graph": "captures"}
    assert Run(*WHY, "--json").json["ways"] == {}
    # a preference says where each stands, whatever the request
    with octavo_registry.prefer("captures", "eager"):
        assert "Eagerly: captures (priority 5)" in Run(*asked).out
    use(monkeypatch, fakes.registry(fakes.plugin("eager", rows=[row])))
    assert "In a CUDA graph: nothing serves it" in Run(*asked).out


def test_why_in_json() -> None:
    """Every reporting command prints one JSON document under --json."""
    answer = Run(*WHY, "--json").json
    assert answer["served"] is True
    assert [(d["backend"], d["verdict"]) for d in answer["decisions"]] == [("a", "chosen"), ("b", "refused")]
    assert answer["request"]["k"] == 128
    assert answer["request"]["groups"] == 4
    assert answer["layer"]["quantize_x"] == {
        "backend": "a",
        "recipe": "mxfp8",
        "layouts": {"rowwise": "plain", "columnwise": "plain"},
        "note": "",
    }


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--graph"], "graph_safe=True was asked for"),
        (["--backend", "b"], "the preference is closed and names b"),
        (["--sharding", "ep,tp"], "operands are sharded over ep, tp"),
    ],
)
def test_why_exits_with_1_where_nothing_serves(arguments: list[str], reason: str) -> None:
    """Exit code 1: the asked thing is unserved; the table is printed all the same, in JSON too."""
    run = Run(*WHY, *arguments)
    assert run.code == 1
    assert reason in run.out
    assert "The layer cannot be composed: nothing here runs" in run.out
    answer = Run(*WHY, *arguments, "--json")
    assert answer.code == 1
    assert answer.json["served"] is False
    assert answer.json["layer"] is None
    assert "nothing here runs" in answer.json["layer_error"]


def test_why_of_other_operations(fakes: Any) -> None:
    """A quantizer is asked for by operand; `layer` is the composition; --inference drops the gradients."""
    rest = WHY[2:]
    for operand in ("x", "w", "dy"):
        run = Run("why", "quantize", *rest, "--operand", operand)
        assert run.code == 0
        assert run.out.startswith(f"quantize in mxfp8 for torch on cpu, {operand} both")
    assert Run("why", "layer", *rest, "--inference", "--json").json["layer"]["wgrad"] is None
    assert Run("why", "wgrad", *rest).code == 0
    run = Run("why", "mlp", *rest)
    assert run.code == 1
    assert "the operation is mlp" in run.out


def test_why_of_fused_quantizers(fakes: Any) -> None:
    """An activation or a normalization is part of the question: `--activation`, `--norm`, swiglu and rms by default."""
    rest = WHY[2:]
    for op, options, words in (
        ("act_quantize", (), "act_quantize of swiglu in mxfp8 for torch on cpu, x both"),
        ("dact_quantize", ("--activation", "gelu"), "dact_quantize of gelu in mxfp8 for torch on cpu, dy both"),
        ("norm_quantize", ("--norm", "layer"), "norm_quantize of layer in mxfp8 for torch on cpu, x both"),
    ):
        run = Run("why", op, *rest, *options)
        assert run.code == 1
        assert run.out.startswith(words)
        assert f"the operation is {op}" in run.out
    asked = Run("why", "act_quantize", *rest, "--json").json["request"]
    assert (asked["activation"], asked["norm"]) == ("swiglu", None)


def test_why_takes_a_recipe_file_and_a_capability(tmp_path: Path) -> None:
    """--recipe is a name or a file; --arch is written as people write it."""
    file = tmp_path / "recipe.json"
    file.write_text(octavo.MXFP8(square_weights=True).to_json())
    for arch in ("9.0", "sm_90", "90", "sm_90a"):
        run = Run("why", "fprop", "--recipe", str(file), "--shape", "64x128x32x4", "--framework", "torch",
                  "--device", "cuda", "--arch", arch)  # fmt: skip
        assert run.code == 0
        assert run.out.startswith("fprop in mxfp8 for torch on cuda (sm_90)")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["why", "fprob", *WHY[2:]], "OP: got 'fprob'; one of quantize, "),
        ([*WHY, "--shape", "1,2,3"], "--shape: got '1,2,3'; give M,K,N,G"),
        ([*WHY, "--shape", "1,2,3,0"], "K, N and G are 1 or more"),
        ([*WHY, "--shape", "1,-2,3,4"], "--shape: got '1,-2,3,4'"),
        ([*WHY, "--recipe", "mxfp9"], "recipe: got 'mxfp9'; known names are bf16, "),
        ([*WHY, "--recipe", "/absent/r.json"], "/absent/r.json: cannot be read (No such file or directory)"),
        ([*WHY, "--arch", "hopper"], "--arch: got 'hopper'; write a compute capability as 9.0 or sm_90"),
        ([*WHY, "--dtype", "int8"], "--dtype: got 'int8'; one of bfloat16, float16, float32"),
        ([*WHY, "--sizes", "disk"], "--sizes: got 'disk'; one of host, device"),
        ([*WHY, "--operand", "y"], "--operand: got 'y'; one of x, w, dy"),
        ([*WHY, "--sharding", "ep,zz"], "--sharding: got 'zz'; one of dp, fsdp, tp, ep"),
        ([*WHY, "--backend", "c"], "backend: there is no backend 'c'; known names are a, b"),
        ([*WHY, "--backend", "; rm -rf"], "backend: got '; rm -rf'"),
        (["why", "quantize", "--recipe", "bf16", *WHY[4:]], "high_precision does not quantize x"),
        (["why", "fprop"], "Missing option '--recipe'"),
        ([*WHY, "--grap"], "No such option: --grap"),
        (["why", "act_quantize", *WHY[2:], "--activation", "mish"], "--activation: got 'mish'; one of silu, "),
        (["whi"], "there is no command 'whi'; did you mean why?"),
        (["recipes", "show", "absent"], "recipe: got 'absent'"),
        (["recipes", "diff", "mxfp8"], "Missing argument 'right'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    """Bad input: cause and fix on one line of stderr, nothing on stdout; under --json the line is JSON."""
    run = Run(*arguments)
    assert (run.code, run.out) == (2, "")
    assert run.err.count("\n") == 1
    assert run.err.startswith("octavo: ")
    assert message.lower() in run.err.lower()
    as_json = Run(*arguments, "--json")
    assert (as_json.code, as_json.out) == (2, "")
    error = json.loads(as_json.err)["error"]
    assert error["exit_code"] == 2
    assert message.lower() in error["message"].lower()


def test_a_corrupt_recipe_file_names_itself(tmp_path: Path) -> None:
    """Bad input: a recipe file that is none."""
    file = tmp_path / "recipe.json"
    for content in (b"{", b"\xff\xfe", b"[]", b'{"kind": "mxfp9", "schema_version": 1}', b'{"kind": "mxfp8"}'):
        file.write_bytes(content)
        run = Run("recipes", "show", str(file))
        assert run.code == 2
        assert run.err.count("\n") == 1
        assert str(file) in run.err


# ---- recipes


def test_recipes_list() -> None:
    """Every preset, with the fingerprint that files and checkpoints carry."""
    listed = Run("recipes", "list", "--json").json
    assert {row["name"]: row["fingerprint"] for row in listed} == {
        name: recipe.fingerprint for name, recipe in octavo.PRESETS.items()
    }
    plain = Run("recipes", "list")
    assert len(plain.out.splitlines()) == len(octavo.PRESETS) + 2
    assert plain.code == 0


def test_recipes_show_prints_a_recipe_file(tmp_path: Path) -> None:
    """What --json prints is read back as the same recipe."""
    for name, recipe in octavo.PRESETS.items():
        run = Run("recipes", "show", name, "--json")
        assert octavo.Recipe.from_json(run.out) == recipe
        assert recipe.fingerprint in Run("recipes", "show", name).out
    assert re.search(r"^  w +e2m1 +e4m3 +16x16 +both +nearest$", Run("recipes", "show", "nvfp4").out, re.MULTILINE)


def test_recipes_diff() -> None:
    """The fields that differ; equal recipes say so with their fingerprint."""
    answer = Run("recipes", "diff", "mxfp8", "mxfp8-square", "--json").json
    assert answer["differences"] == [{"field": "square_weights", "left": "False", "right": "True"}]
    assert re.search(r"square_weights +False +True", Run("recipes", "diff", "mxfp8", "mxfp8-square").out)
    same = Run("recipes", "diff", "row", "fp8-row")
    assert same.code == 0
    assert "row and fp8-row mean the same" in same.out


# ---- doctor


def test_doctor_of_a_healthy_installation() -> None:
    """Exit code 0 and every section; what is not installed is not broken."""
    run = Run("doctor")
    assert run.code == 0
    for heading in ("Environment", "Plugins", "Backends", "Front ends", "Commands of other packages"):
        assert heading in run.out.splitlines()
    assert "Nothing is broken." in run.out
    answer = Run("doctor", "--json").json
    assert answer["healthy"] is True
    assert answer["broken"] == []
    assert [backend["name"] for backend in answer["backends"]] == ["a", "b"]


def test_doctor_tells_what_is_broken(
    install: Any, discovered: Callable[[], Registry], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plugin, front end and command: each broken one is a row and a sentence, and the exit code is 1."""
    install(
        "test-bad",
        {"oct_bad": "raise OSError('libacme.so.2\\x1b[2J not found')"},
        {
            "octavo.backends": {"bad": "oct_bad"},
            "octavo.frameworks": {"worse": "oct_bad:BRIDGE"},
            "octavo.commands": {"worst": "oct_bad:app"},
        },
    )
    use(monkeypatch, discovered())
    run = Run("doctor")
    assert run.code == 1
    assert "3 broken:" in run.out
    assert "\x1b" not in run.out
    answer = Run("doctor", "--json")
    assert answer.code == 1
    assert answer.json["healthy"] is False
    kinds = [sentence.split()[0] for sentence in answer.json["broken"]]
    assert kinds == ["plugin", "front", "command"]
    assert all("OSError: libacme.so.2" in sentence for sentence in answer.json["broken"])


def test_doctor_shows_what_packages_say_of_themselves(install: Any) -> None:
    """A compiled package tells which kernels it has; no card or hook could, and the registry imports none of them."""
    install(
        "test-kernels",
        {"oct_kernels": "def lines():\n    return ['kernels for the CPU alone', 'run: make kernels']"},
        {"octavo.doctor": {"test-kernels": "oct_kernels:lines"}},
        version="2.1",
    )
    run = Run("doctor")
    assert run.code == 0
    assert [line.split(maxsplit=1)[1] for line in run.out.splitlines() if line.strip().startswith("test-kernels")] == [
        "kernels for the CPU alone",
        "run: make kernels",
    ]
    (note,) = Run("doctor", "--json").json["notes"]
    assert (note["distribution"], note["version"], note["reason"]) == ("test-kernels", "2.1", "")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("raise OSError('libacme.so.2 not found')", "OSError: libacme.so.2 not found"),
        ("def lines():\n    raise SystemExit(3)", "SystemExit: 3"),
        ("def lines():\n    return [7]", "a function of octavo.doctor returns strings"),
        ("lines = 7", "TypeError: 'int' object is not callable"),
    ],
)
def test_a_note_that_fails_is_broken_and_breaks_nothing(install: Any, body: str, reason: str) -> None:
    """Import, call and answer are guarded alike; the exit code is 1."""
    install("test-bad", {"oct_note": body}, {"octavo.doctor": {"sick": "oct_note:lines"}})
    run = Run("doctor", "--json")
    assert run.code == 1
    (sentence,) = run.json["broken"]
    assert sentence.startswith("note sick of test-bad: ")
    assert reason in sentence
    assert "sick" in Run("doctor").out


def test_doctor_reports_a_bad_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """OCTAVO_BACKEND with anything but names is broken configuration, said before a job starts."""
    monkeypatch.setenv("OCTAVO_BACKEND", "; rm -rf /")
    run = Run("doctor", "--json")
    assert run.code == 1
    assert "OCTAVO_BACKEND: got '; rm -rf /'" in run.json["broken"][0]


def test_doctor_reports_a_preference_for_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every plan of such a process would raise; `"*"` and known names are fine."""
    monkeypatch.setenv("OCTAVO_BACKEND", "a,typo,*")
    assert Run("doctor", "--json").json["broken"] == [
        "OCTAVO_BACKEND: there is no backend 'typo'; known names are a, b"
    ]


def test_doctors_self_test_compares_bits(fakes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend whose bits differ from the definition is broken; one that raises is, too."""
    np = pytest.importorskip("numpy")

    class Quantized:
        def __init__(self, codes: Any) -> None:
            self.rowwise = codes
            self.rowwise_scale = self.rowwise_global = None
            self.columnwise = self.columnwise_scale = self.columnwise_global = None

    class Numerics:
        @staticmethod
        def quantize(x: Any, spec: Any, sizes: Any) -> Quantized:
            return Quantized(x.astype(np.uint8))

    class Bridge:
        name = "torch"

        def devices(self) -> list[Device]:
            return [Device("cpu", None, "cpu")]

        def from_numpy(self, array: Any, device: str) -> Any:
            return array

        def to_numpy(self, array: Any) -> Any:
            return array

        def quantize(self, x: Any, spec: Any, sizes: Any, *, backend: str) -> Quantized:
            codes = x.astype(np.uint8)
            if backend == "wrong":
                codes[3, 5] ^= 1
            if backend == "raises":
                raise RuntimeError("no kernel image")
            return Quantized(codes)

    monkeypatch.setattr(selftest, "definition", lambda: Numerics)
    use(monkeypatch, fakes.registry(*(fakes.plugin(name) for name in ("right", "wrong", "raises"))))
    bridge: Any = Bridge()
    outcomes = {outcome.backend: outcome for outcome in selftest.run([bridge])}
    assert outcomes["right"].status == "ok"
    assert outcomes["wrong"].status == "broken"
    assert "rowwise differs from the definition in 1 bytes, first at [3, 5]" in outcomes["wrong"].detail
    assert outcomes["raises"].detail == "RuntimeError: no kernel image"


# ---- commands of other packages

COMMANDS = """
import typer
app = typer.Typer(help="Several.")

@app.command()
def one(word: str = "x"):
    "The first."
    print("one", word)

@app.command()
def two():
    raise typer.Exit(7)

single = typer.Typer()

@single.command()
def whatever(count: int = 1):
    print("single", count)

def function(name: str, loud: bool = False):
    "A function."
    print("hello", name, loud)

def fails():
    from octavo import OctavoError
    raise OctavoError("disk 3 is full; free some")

def code():
    return 5

NUMBER = 3
"""


@pytest.fixture
def extended(install: Any) -> None:
    """A distribution with commands of every form, and broken ones."""
    names = {
        "several": "app",
        "single": "single",
        "function": "function",
        "fails": "fails",
        "code": "code",
        "number": "NUMBER",
        "absent": "gone",
        "why": "function",
        "train": "function",
    }
    points = {name: f"oct_commands:{target}" for name, target in names.items()}
    install("test-more", {"oct_commands": COMMANDS}, {"octavo.commands": points}, summary="More commands.")


@pytest.mark.usefixtures("extended")
def test_other_packages_add_commands() -> None:
    """Entry-point group octavo.commands: a Typer app of any size, or a function."""
    assert Run("several", "one", "--word", "y").out == "one y\n"
    assert Run("several", "two").code == 7
    assert Run("single", "--count", "3").out == "single 3\n"
    assert Run("function", "you", "--loud").out == "hello you True\n"
    assert Run("code").code == 5
    assert "--install-completion" not in Run("single", "--help").out
    failed = Run("fails")
    assert (failed.code, failed.err) == (1, "octavo: disk 3 is full; free some\n")


@pytest.mark.usefixtures("extended")
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("number", "TypeError: 3 is no command; name a Typer app or a function"),
        ("absent", "AttributeError: module 'oct_commands' has no attribute 'gone'"),
        ("train", "'train' belongs to octavo; test-more 1.0 (plugin train) needs a name of its own"),
    ],
)
def test_a_broken_command_is_one_line_and_breaks_nothing(name: str, reason: str) -> None:
    """It says which distribution brought it, and doctor lists it."""
    run = Run(name)
    assert run.code == 1
    assert run.err.count("\n") == 1
    assert f"octavo: {name}: the command of test-more 1.0 is broken: {reason}" in run.err
    listed = {row["name"]: row for row in Run("doctor", "--json").json["commands"]}
    assert listed[name]["status"] == "broken"
    assert reason in listed[name]["reason"]
    assert Run(*WHY).code == 0


@pytest.mark.usefixtures("extended")
def test_help_lists_commands_without_loading_them() -> None:
    """Names and lines of help come from metadata, so that a slow or hostile package costs help nothing."""
    import sys

    run = Run("--help")
    assert run.code == 0
    assert re.search(r"^  several +More commands. \(test-more\)$", run.out, re.MULTILINE)
    assert "oct_commands" not in sys.modules
    assert Run().out == run.out


def test_version() -> None:
    """One line."""
    assert Run("--version").out == f"octavo-registry {octavo_registry.__version__}\n"
