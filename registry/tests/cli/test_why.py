"""`octavo why`: what it prints, its JSON, its exit codes."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

import octavo
import octavo_registry
from octavo_registry.cli.why import ranks
from octavo_registry.discovery import install
from octavo_registry.discovery.bridges import FrameworkRecord

WHY = ["why", "fprop", "--recipe", "mxfp8", "--shape", "4,128,32,64", "--framework", "torch", "--device", "cpu"]


def test_why_shows_every_verdict_and_the_layer(run: Any) -> None:
    """command.md: `why` prints every backend's verdict, and for a GEMM the composition of its layer."""
    ran = run(*WHY)
    assert ran.code == 0
    assert ran.err == ""
    lines = ran.out.splitlines()
    assert lines[0] == "fprop in mxfp8 for torch on cpu"
    assert re.fullmatch(r"  a +chosen +\(this process\) +the only one that serves this", lines[2])
    assert re.fullmatch(r"  b +refused +\(this process\) +serves cuda, the device is cpu", lines[3])
    assert "The layer" in lines
    assert re.search(r"^  wgrad +a +mxfp8", ran.out, re.MULTILINE)


def test_why_shows_the_eager_and_the_graph_safe_choice(run: Any, use: Any, fakes: Any) -> None:
    """torch.md: `why` shows both plans and why one was chosen; of equal ones the request decides."""
    row = fakes.row(device="cuda")
    both = [row, row.model_copy(update={"graph_safe": True})]
    registry = fakes.registry(
        fakes.plugin("eager", rows=both, priority=5), fakes.plugin("captures", rows=both[1:], priority=5)
    )
    use(registry)
    asked = [*WHY, "--device", "cuda", "--arch", "9.0"]
    expected = [
        "Eagerly: eager (has the priority of captures, 5, and is made for eager calls, too)",
        "In a CUDA graph: captures (has the priority of eager, 5, and is made for CUDA graphs)",
    ]
    for graph, chosen in ((False, "eager"), (True, "captures")):
        ran = run(*asked, *(["--graph"] if graph else []))
        start = ran.out.splitlines().index(expected[0])
        assert ran.out.splitlines()[start : start + 2] == expected
        assert re.search(rf"^  wgrad +{chosen} +mxfp8", ran.out, re.MULTILINE)
    assert run(*asked, "--json").json["ways"] == {"eager": "eager", "graph": "captures"}
    assert run(*WHY, "--json").json["ways"] == {}
    # a preference says where each stands, whatever the request
    with octavo_registry.prefer("captures", "eager"):
        assert "Eagerly: captures (asked for before eager)" in run(*asked).out
    use(fakes.registry(fakes.plugin("eager", rows=[row])))
    assert "In a CUDA graph: nothing serves it" in run(*asked).out


def test_why_is_headed_by_what_was_asked(run: Any) -> None:
    """A question about a whole layer is not headed like one about its first product."""
    product = "who serves its first product, fprop in mxfp8 for torch on cpu"
    for asked, title in (
        (["layer"], f"A grouped linear layer in mxfp8, forward and backward: {product}"),
        (["layer", "--inference"], f"A grouped linear layer in mxfp8, forward alone: {product}"),
        (["mlp"], f"An expert MLP with swiglu in mxfp8, forward and backward: {product}"),
        (["moe", "--activation", "gelu"], f"A MoE layer with gelu in mxfp8, forward and backward: {product}"),
        (["dgrad"], "dgrad in mxfp8 for torch on cpu"),
    ):
        assert run("why", *asked, *WHY[2:]).out.splitlines()[0] == title


def test_why_asks_with_sizes_where_layers_have_them(run: Any, use: Any, fakes: Any) -> None:
    """`why` gives the verdicts of `explain`: in torch a CPU's sizes are in host memory, and a backend that takes them
    there, as the template's, serves; JAX's are traced, a GPU's are on it, and moved rows have none."""
    host = {"framework": "torch", "device": "cpu", "sizes": {"host"}}
    use(fakes.registry(fakes.plugin("listed", rows=[fakes.row(**host)])))
    for asked in ("fprop", "layer", "quantize"):
        assert run("why", asked, *WHY[2:]).code == 0
    assert run("why", "layer", *WHY[2:], "--sizes", "device").code == 1
    for op, framework, device, where in (
        ("layer", "torch", "cpu", "host"),
        ("layer", "torch", "cuda", "device"),
        ("layer", "jax", "cpu", "device"),
        ("permute_rows", "torch", "cpu", "device"),
    ):
        answer = run("why", op, "--recipe", "mxfp8", "--framework", framework, "--device", device, "--json").json
        assert answer["request"]["sizes"] == where


def test_verdicts_on_a_layer_are_those_of_its_composition(run: Any, use: Any, fakes: Any) -> None:
    """A backend whose layer the front end gives a transposed copy of w serves it, and no verdict says otherwise."""
    turns = fakes.plugin("turns", rows=[fakes.row(framework="jax")], priority=9)
    use(fakes.registry(turns, fakes.plugin("lies", rows=[fakes.row(framework="jax", weights={"nk", "kn"})])))
    asked = ["--recipe", "mxfp8", "--framework", "jax", "--device", "cpu"]
    for op in ("layer", "mlp"):
        ran = run("why", op, *asked)
        assert re.search(r"^  turns +chosen ", ran.out, re.MULTILINE)
        assert re.search(r"^  (fc1 )?fprop +turns ", ran.out, re.MULTILINE)
        assert "w as [G, K, N]" not in ran.out.splitlines()[0]
    assert re.search(r"^  lies +chosen ", run("why", "fprop", *asked).out, re.MULTILINE)


def test_why_in_json(run: Any) -> None:
    """Every reporting command prints one JSON document under --json."""
    answer = run(*WHY, "--json").json
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


def test_what_a_plugin_prints_is_not_in_the_answer(run: Any, use: Any, fakes: Any) -> None:
    """A leftover print in a backend goes to stderr: scripts read stdout."""

    class Loud(fakes.Backend):  # type: ignore[misc,name-defined]
        def refuses(self, request: Any) -> Any:
            print("hello from a plugin")
            return super().refuses(request)

    use(fakes.registry(fakes.plugin("a", Loud())))
    answer = run(*WHY, "--json")
    assert answer.json["served"] is True
    assert "hello from a plugin" in answer.err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--graph"], "graph_safe=True was asked for"),
        (["--backend", "b"], "the preference is closed and names b"),
    ],
)
def test_why_exits_with_1_where_nothing_serves(run: Any, arguments: list[str], reason: str) -> None:
    """Exit code 1: the asked thing is unserved; the table is printed all the same, in JSON too."""
    ran = run(*WHY, *arguments)
    assert ran.code == 1
    assert reason in ran.out
    assert "The layer cannot be composed: nothing here runs" in ran.out
    answer = run(*WHY, *arguments, "--json")
    assert answer.code == 1
    assert answer.json["served"] is False
    assert answer.json["layer"] is None
    assert "nothing here runs" in answer.json["layer_error"]


def test_why_of_other_operations(run: Any, fakes: Any) -> None:
    """A quantizer is asked for by operand; `layer` is the composition; --inference drops the gradients."""
    rest = WHY[2:]
    for operand in ("x", "w", "dy"):
        ran = run("why", "quantize", *rest, "--operand", operand)
        assert ran.code == 0
        assert ran.out.startswith(f"quantize in mxfp8 for torch on cpu, {operand} both")
    assert run("why", "layer", *rest, "--inference", "--json").json["layer"]["wgrad"] is None
    assert run("why", "wgrad", *rest).code == 0
    ran = run("why", "route", *rest)
    assert ran.code == 1
    assert "the operation is route" in ran.out


def test_why_of_fused_quantizers(run: Any, fakes: Any) -> None:
    """An activation or a normalization is part of the question: `--activation`, `--norm`, swiglu and rms by default."""
    rest = WHY[2:]
    for op, options, words in (
        ("act_quantize", (), "act_quantize of swiglu in mxfp8 for torch on cpu, x both"),
        ("dact_quantize", ("--activation", "gelu"), "dact_quantize of gelu in mxfp8 for torch on cpu, dy both"),
        ("norm_quantize", ("--norm", "layer"), "norm_quantize of layer in mxfp8 for torch on cpu, x both"),
    ):
        ran = run("why", op, *rest, *options)
        assert ran.code == 1
        assert ran.out.startswith(words)
        assert f"the operation is {op}" in ran.out
    asked = run("why", "act_quantize", *rest, "--json").json["request"]
    assert (asked["activation"], asked["norm"]) == ("swiglu", None)


def test_why_takes_a_recipe_file_and_a_capability(run: Any, tmp_path: Path) -> None:
    """--recipe is a name or a file; --arch is written as people write it."""
    file = tmp_path / "recipe.json"
    file.write_text(octavo.MXFP8(square_weights=True).to_json())
    for arch in ("9.0", "sm_90", "90", "sm_90a"):
        ran = run("why", "fprop", "--recipe", str(file), "--shape", "4x128x32x64", "--framework", "torch",
                  "--device", "cuda", "--arch", arch)  # fmt: skip
        assert ran.code == 0
        assert ran.out.startswith("fprop in mxfp8 for torch on cuda (sm_90)")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["why", "fprob", *WHY[2:]], "OP is 'fprob'; give one of quantize, "),
        ([*WHY, "--shape", "1,2,3"], "--shape: got '1,2,3'; give G,K,N,M"),
        ([*WHY, "--shape", "0,2,3,1"], "G, K and N are 1 or more"),
        ([*WHY, "--shape", f"4,128,32,{1 << 63}"], "sizes of arrays are below 2^63"),
        ([*WHY, "--shape", "1,-2,3,4"], "--shape: got '1,-2,3,4'"),
        ([*WHY, "--recipe", "mxfp9"], "recipe: got 'mxfp9'; did you mean mxfp8?; known names are bf16, "),
        ([*WHY, "--recipe", "/absent/r.json"], "/absent/r.json: cannot be read (No such file or directory)"),
        ([*WHY, "--arch", "hopper"], "--arch: got 'hopper'; write a compute capability as 9.0 or sm_90"),
        ([*WHY, "--arch", "4090"], "--arch: got '4090'; write a compute capability as 9.0 or sm_90"),
        ([*WHY, "--dtype", "int8"], "--dtype is 'int8'; give 'bfloat16', 'float16' or 'float32'"),
        ([*WHY, "--sizes", "disk"], "--sizes is 'disk'; give 'host' or 'device'"),
        ([*WHY, "--operand", "y"], "--operand is 'y'; give 'x', 'w' or 'dy'"),
        ([*WHY, "--backend", "c"], "backend: there is no backend 'c'; known names are a, b"),
        ([*WHY, "--backend", "; rm -rf"], "backend: got '; rm -rf'"),
        (["why", "quantize", "--recipe", "bf16", *WHY[4:]], "high_precision does not quantize x"),
        (["why", "fprop"], "Missing option '--recipe'"),
        ([*WHY, "--grap"], "No such option: --grap"),
        (["why", "act_quantize", *WHY[2:], "--activation", "mish"], "--activation is 'mish'; give one of silu, "),
        (["whi"], "there is no command 'whi'; did you mean why?"),
        (["recipes", "show", "absent"], "recipe: got 'absent'"),
        (["recipes", "diff", "mxfp8"], "Missing argument 'right'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(run: Any, arguments: list[str], message: str) -> None:
    """Bad input: cause and fix on one line of stderr, nothing on stdout; under --json the line is JSON."""
    ran = run(*arguments)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.count("\n") == 1
    assert ran.err.startswith("octavo: ")
    assert message.lower() in ran.err.lower()
    as_json = run(*arguments, "--json")
    assert (as_json.code, as_json.out) == (2, "")
    error = json.loads(as_json.err)["error"]
    assert error["exit_code"] == 2
    assert message.lower() in error["message"].lower()


def test_moves_of_rows_need_no_recipe(run: Any) -> None:
    """`octavo why permute_rows`, as the guide has it: rows move alike in every recipe."""
    short, long = run("why", "permute_rows"), run("why", "permute_rows", "--recipe", "mxfp8")
    assert short.out.startswith("permute_rows")
    assert (short.code, short.out) == (long.code, long.out)
    assert "Layers run without a backend for it: torch's own operations compute permute_rows." in short.out


def test_why_needs_no_shape(run: Any) -> None:
    """`octavo why fprop --recipe mxfp8` is a question, too: K, N and the number of groups are left open."""
    short = [*WHY[:4], *WHY[6:]]
    answer = run(*short, "--json").json
    assert answer["served"] is True
    assert [answer["request"][name] for name in ("k", "n", "groups")] == [None, None, None]
    assert run(*short, "--kernels").err == "octavo: --kernels depends on the shape; give --shape G,K,N,M, too\n"


def test_why_says_which_codes_are_made_of_tokens(run: Any, use: Any, fakes: Any) -> None:
    """x of fc1 and dy of fc2, where the backend has `of_tokens` and no product in high precision reads the rows,
    and products that gather. In JAX the choices' weights may multiply dy before."""

    class OfTokens(fakes.Backend):  # type: ignore[misc, name-defined]
        gathers: tuple[str, ...] = ()

        def bind(self, request: Any) -> Any:
            bound = super().bind(request)
            if request.op == "quantize":
                return replace(bound, of_tokens=print)
            return replace(bound, takes_tokens=("dy",)) if request.op in self.gathers else bound

    of_rows = {"recipes": {"mxfp8", "row", "high_precision"}}
    in_jax = fakes.row(**of_rows, framework="jax", weights={"nk", "kn"})
    use(fakes.registry(fakes.plugin("a", OfTokens(), rows=[fakes.row(**of_rows), in_jax])))
    for recipe, op, expected in (
        ("mxfp8", "moe", ["fc1 quantize x", "fc2 quantize dy"]),
        ("mxfp8", "mlp", []),
        ("fp8-row-wgrad-high-precision", "moe", ["fc1 quantize x"]),
    ):
        parts = run("why", op, "--recipe", recipe, *WHY[4:], "--json").json["parts"]
        assert [part["operation"] for part in parts if "from tokens" in part["how"]] == expected
    gathering = OfTokens()
    gathering.gathers = ("wgrad",)
    use(fakes.registry(fakes.plugin("a", gathering, rows=[fakes.row(**of_rows)])))
    parts = run("why", "moe", "--recipe", "fp8-row-wgrad-high-precision", *WHY[4:], "--json").json["parts"]
    of_tokens = [part["operation"] for part in parts if "from tokens" in part["how"]]
    assert of_tokens == ["fc1 quantize x", "fc2 quantize dy", "fc2 wgrad"]
    use(fakes.registry(fakes.plugin("a", OfTokens(), rows=[fakes.row(**of_rows), in_jax])))
    for framework, unless in (("torch", False), ("jax", True)):
        parts = run("why", "moe", "--recipe", "mxfp8", *WHY[4:], "--framework", framework, "--json").json["parts"]
        (how,) = (part["how"] for part in parts if part["operation"] == "fc2 quantize dy")
        assert ("unless the choices' weights multiply it" in how) is unless


@pytest.mark.parametrize("op", ["mlp", "moe"])
def test_why_composes_an_mlp_and_a_moe_layer(run: Any, use: Any, fakes: Any, op: str) -> None:
    """Exit code 0 where the layers are served: the activation and moved rows are the front end's where nobody has
    them. fc1 of a gated MLP is [2 F, K], fc2 [K, F]."""
    asked = ["why", op, *WHY[2:]]
    ran = run(*asked)
    assert ran.code == 0
    for part in ("fc1 quantize x", "fc1 wgrad", "fc2 fprop"):
        assert re.search(rf"^  {part} +a +mxfp8", ran.out, re.MULTILINE)
    assert re.search("^  swiglu's gradient +- +- +composed of torch's operations: no backend serves", ran.out, re.M)
    assert ("  route " in ran.out) is (op == "moe")
    parts = run(*asked, "--inference", "--json").json["parts"]
    names = [part["operation"] for part in parts]
    assert "fc2 wgrad" not in names
    assert "dot_rows" not in names
    use(fakes.registry(fakes.plugin("a", rows=[fakes.row(ops={"fprop", "dgrad", "wgrad"})])))
    ran = run(*asked)
    assert ran.code == 1
    assert f"The {'MLP' if op == 'mlp' else 'MoE layer'} cannot be composed: nothing here runs quantize" in ran.out
    use(fakes.registry(fakes.plugin("a", rows=[fakes.row(ops=FUSED)])))
    parts = {part["operation"]: part for part in run(*asked, "--json").json["parts"]}
    assert (parts["swiglu"]["backend"], parts["swiglu"]["how"]) == ("a", "fused with its quantizer")


def test_why_says_what_ranks_exchange(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the front end's word; where it has none, or the question is of one process, a sentence says so."""

    class Spreads:
        def explain_exchange(self, recipe: Any, ranks: int, dtype: Any, device: Any) -> list[tuple[str, str]]:
            return [("route", f"by pigeon, {ranks} of them, {recipe.kind} {dtype} on {device}")]

    asked = ["why", "moe", *WHY[2:], "--ranks", "4"]
    refused = run(*asked)
    assert refused.code == 2
    assert "--ranks: no front end of torch that is installed" in refused.err
    record = FrameworkRecord("torch", "octavo-torch", "1", "a:b", cast(Any, Spreads()))
    monkeypatch.setattr(ranks, "framework_record", lambda name: record)
    assert "by pigeon, 4 of them, mxfp8 bfloat16 on cpu" in run(*asked).out
    assert run(*asked, "--json").json["exchange"] == {"route": "by pigeon, 4 of them, mxfp8 bfloat16 on cpu"}
    supposed = run(*asked[: asked.index("--device")], "--ranks", "4", "--hypothetical", "h100", "--json").json
    assert supposed["exchange"] == {"route": "by pigeon, 4 of them, mxfp8 bfloat16 on cuda"}
    for question in (["why", *WHY[1:], "--ranks", "4"], [*asked[:-1], "0"]):
        assert run(*question).code == 2


@pytest.mark.parametrize(
    ("op", "option", "sentence"),
    [
        ("fprop", ["--operand", "dy"], "--operand dy: fprop does not depend on it; leave it out"),
        ("layer", ["--activation", "gelu"], "--activation gelu: layer does not depend on it"),
        ("quantize", ["--norm", "layer"], "--norm layer: quantize does not depend on it"),
        ("fprop", ["--arch", "9.0"], "--arch: got 9.0, and the device is a cpu, which has no compute capability"),
    ],
)
def test_an_option_that_nothing_depends_on_is_refused(op: str, option: list[str], sentence: str, run: Any) -> None:
    """The answer was to another question: that of `--arch 9.0` was about a cpu (sm_90)."""
    ran = run("why", op, *WHY[2:], *option)
    assert (ran.code, ran.out) == (2, "")
    assert sentence in ran.err


FUSED = frozenset({"quantize", "act_quantize", "dact_quantize", "fprop", "dgrad", "wgrad"})


def test_why_names_the_nearest_change(run: Any, use: Any, fakes: Any) -> None:
    """For a backend that would come first and refuses; where nothing serves, also another device."""
    bf16 = fakes.row(in_dtypes={"float32"})
    use(fakes.registry(fakes.plugin("tuned", rows=[bf16], priority=100), fakes.plugin("a")))
    assert run(*WHY, "--json").json["changes"] == [{"words": "float32 operands", "backends": ["tuned"]}]
    use(fakes.registry(fakes.plugin("block", rows=[fakes.row(recipes={"block"})])))
    ran = run(*WHY)
    assert ran.code == 1
    assert "  recipe fp8-block: block" in ran.out.splitlines()
    use(fakes.registry(fakes.plugin("listed", rows=[fakes.row(sizes={"host"})])))
    assert "  group sizes on the host: listed" in run(*WHY, "--sizes", "device").out.splitlines()
    use(fakes.registry(fakes.plugin("a")))
    assert "on the CPU: a" in run(*WHY[:-1], "cuda", "--arch", "9.0").out


def test_reasons_are_not_said_twice(run: Any) -> None:
    """Where nothing serves, the composition fails for the reasons that stand in the table."""
    ran = run(*WHY, "--graph")
    assert ran.out.count("graph_safe=True was asked for") == 1


def test_an_unknown_framework_is_bad_input(run: Any) -> None:
    """Not an answer that everybody refuses."""
    ran = run(*WHY[:6], "--framework", "tensorflow")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == "octavo: --framework is 'tensorflow'; give 'jax' or 'torch'\n"


def test_a_corrupt_recipe_file_names_itself(run: Any, tmp_path: Path) -> None:
    """Bad input: a recipe file that is none."""
    file = tmp_path / "recipe.json"
    for content in (b"{", b"\xff\xfe", b"[]", b'{"kind": "mxfp9", "schema_version": 1}', b'{"kind": "mxfp8"}'):
        file.write_bytes(content)
        ran = run("recipes", "show", str(file))
        assert ran.code == 2
        assert ran.err.count("\n") == 1
        assert str(file) in ran.err


def _reference(fakes: Any, use: Any, **row: Any) -> None:
    use(fakes.registry(fakes.plugin("torch-reference", rows=[fakes.row(**row)], priority=-100)))


def test_why_names_the_package_with_kernels_where_a_reference_backend_serves(
    run: Any, use: Any, fakes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """command.md: what is slow because a package is missing says which, and how to install it."""
    monkeypatch.setattr(install, "installed_version", lambda name: None if "native" in name else "0.2.0")
    _reference(fakes, use)
    said = (
        "torch-reference is exact and slow. octavo-torch-native has compiled kernels for this device, and is not "
        "installed; in a clone of Octavo run: pip install ./native ./packages/torch-native"
    )
    assert said in run(*WHY).out.splitlines()
    assert run(*WHY, "--json").json["missing"] == said
    assert run(*WHY, "--backend", "torch-reference", "--json").json["missing"] is None
    assert run("why", "route", "--framework", "torch", "--json").json["missing"] == said.partition("slow. ")[2]
    assert run("why", "adamw_step", "--framework", "torch", "--json").json["missing"] is None  # it has none for CPUs
    monkeypatch.setattr(install, "installed_version", lambda _: "0.2.0")
    assert run(*WHY, "--json").json["missing"] is None


@pytest.mark.parametrize(
    ("chip", "missing"),
    [
        ("h100", "octavo-torch-native has compiled kernels for this device"),
        ("b200", "octavo-torch-triton has kernels in Triton for this device, not yet run on one"),
        ("t4", ""),
        ("11.0", ""),
    ],
)
def test_why_names_what_a_chip_that_is_elsewhere_needs(
    run: Any, use: Any, fakes: Any, monkeypatch: pytest.MonkeyPatch, chip: str, missing: str
) -> None:
    """The kernels of a package are for some chips, and a chip that none is for has no advice."""
    monkeypatch.setattr(install, "installed_version", lambda _: None)
    _reference(fakes, use, device="cuda")
    said = run(*WHY[:8], "--hypothetical", chip, "--json").json["missing"] or ""
    assert missing in said
    assert bool(missing) == bool(said)


def test_why_says_that_no_backend_is_for_a_framework(run: Any, use: Any, fakes: Any) -> None:
    """An installation for JAX that is asked about torch: the sentence says what to install, beside the verdicts."""
    use(fakes.registry(fakes.plugin("a", rows=[fakes.row(framework="jax")])))
    ran = run(*WHY)
    assert ran.code == 1
    assert "No backend for torch is installed; " in ran.out
    assert "./packages/torch" in ran.out
