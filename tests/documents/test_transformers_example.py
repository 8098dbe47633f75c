"""The example of docs/ that trains models of transformers does what its page says, with tiny models on a CPU."""

from __future__ import annotations

import json
import runpy
import secrets
import sys
from pathlib import Path

import pytest
from workspace import ROOT

EXAMPLE = ROOT / "docs" / "examples" / "transformers_moe.py"
pytestmark = pytest.mark.filterwarnings("default")  # those of transformers and PEFT are not ours to judge


def run(script: Path, *arguments: str) -> None:
    """A script as the command line runs it, in this process: transformers takes longer to import than to train."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(script), *arguments])
        runpy.run_path(str(script), run_name="__main__")


@pytest.mark.parametrize("model", ["qwen3-moe", "gpt-oss"])
def test_tiny_models_learn_in_every_way(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Losses fall, those of bf16 begin as grouped_mm's do and those of a recipe near them, and the JSON has what is
    printed. The first loss is before any update: it differs by roundings of bf16 alone, of which each way has its own
    at a few hundred places of a sum that is averaged over the tokens."""
    pytest.importorskip("transformers", reason="it is not installed; `nox -s adapters` installs it")
    output = tmp_path / "result.json"
    run(EXAMPLE, model, "--device", "cpu", "--layers", "1", "--output", str(output))
    record = json.loads(output.read_text())
    rows = {row["way"]: row for row in record["rows"]}
    assert list(rows) == ["grouped_mm", "octavo bf16", "octavo mxfp8"]
    assert all(row["losses"][-1] < row["losses"][0] for row in rows.values())
    first = {way: row["losses"][0] for way, row in rows.items()}
    assert abs(first["octavo bf16"] - first["grouped_mm"]) <= 2.0**-8 * first["grouped_mm"]
    assert rows["octavo mxfp8"]["losses"] != rows["octavo bf16"]["losses"]
    assert all(row["tokens_per_second"] > 0 and row["experts_ms"] > 0 for row in rows.values())
    assert all(row["peak_bytes"] is None for row in rows.values())
    printed = capsys.readouterr().out
    assert all(way in printed for way in rows)


def test_lora_is_measured_in_every_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tiny model trains in each way from the same weights, every adapter receives a gradient, and the JSON has what
    is printed. The first loss has no adapter's part yet: it differs by the recipe's rounding of the experts alone."""
    pytest.importorskip("peft", reason="it is not installed; `nox -s adapters` installs it")
    output = tmp_path / "result.json"
    small = ("--steps", "3", "--layers", "1")
    run(ROOT / "benchmarks" / "lora.py", "--device", "cpu", "--output", str(output), *small)
    printed = capsys.readouterr().out
    rows = {row["way"]: row for row in json.loads(output.read_text())["rows"]}
    assert list(rows) == ["grouped_mm", "octavo fp8-block", "octavo packed"]
    for way, row in rows.items():
        assert way in printed
        assert row["parameters_without_gradient"] == 0
        assert row["losses"][-1] != row["losses"][0]
    first = rows["grouped_mm"]["losses"][0]
    assert abs(rows["octavo fp8-block"]["losses"][0] - first) <= 2.0**-8 * first
    assert len({row["trained_parameters"] for row in rows.values()}) == 1


@pytest.mark.parametrize("model", ["qwen3-moe", "gpt-oss"])
def test_whole_models_take_turns(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One model serves every way and each optimizer, whose rows are printed, and the experts' time is a part of the
    step's."""
    pytest.importorskip("transformers", reason="it is not installed; `nox -s adapters` installs it")
    output = tmp_path / "speed.json"
    ways = ("grouped_mm", "grouped_mm/norms", "bf16", "fp8-block/lean/remake/linears/norms")
    chosen = [part for way in ways[1:] for part in ("--way", way)] + ["--optimizer", "torch", "--optimizer", "octavo"]
    tiny = ("--quick", "--device", "cpu", "--turns", "2", "--calls", "1", "--output", str(output))
    run(ROOT / "benchmarks" / "whole_models", "speed", model, *chosen, *tiny)
    rows = json.loads(output.read_text())["rows"]
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if "over_grouped_mm" in line] == [
        "  ".join(f"{key} {value}" for key, value in row.items()) for row in rows
    ]
    assert [(row["optimizer"], row["way"]) for row in rows] == [
        (name, way) for name in ("torch", "octavo") for way in ways
    ]
    for row in rows:
        assert 0 < row["experts_share"] < 1
        assert row["optimizer_ms"] < row["step_ms"]
        assert row["tokens_per_second"] > 0
        theirs = rows[0 if row["optimizer"] == "torch" else len(ways)]
        assert row["over_grouped_mm"]["experts_ms"] == pytest.approx(row["experts_ms"] / theirs["experts_ms"], abs=1e-4)
        assert row["over_first"]["tokens_per_second"] == pytest.approx(rows[0]["step_ms"] / row["step_ms"], abs=1e-4)


def test_a_way_takes_the_projections_and_gives_them_back() -> None:
    """With /linears they compute in the way's recipe, from the parameters that the model has; without, torch's do."""
    transformers = pytest.importorskip("transformers", reason="it is not installed; `nox -s adapters` installs it")
    from torch import nn

    import octavo
    from octavo_torch import Linear

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks" / "whole_models"))
        import ways
    config = transformers.Qwen3MoeConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
        num_hidden_layers=2, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=32,
    )  # fmt: skip
    model = transformers.Qwen3MoeForCausalLM._from_config(config)
    parameters, served = dict(model.named_parameters()), ways.Served(model)
    for way, kind in (("fp8-block/lean/linears", Linear), ("fp8-block", nn.Linear), ("mxfp8/linears", Linear)):
        served.by(way)
        projections = [getattr(layer.self_attn, f"{part}_proj") for layer in model.model.layers for part in "qkvo"]
        assert {type(module) for module in projections} == {kind}
        if kind is Linear:
            assert {module.recipe for module in projections} == {octavo.recipe(way.split("/")[0])}
        assert type(model.lm_head) is nn.Linear
        assert all(value is parameters[name] for name, value in model.named_parameters())


def test_a_way_takes_the_norms_and_gives_them_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """With /norms torch's rms_norm computes all of them, from the weights and the epsilons that they have, and so it
    does after the assignment of docs/whole-models.md. Rows of ones with an epsilon of 3 are halved without an error, so
    both ways have the same bits."""
    transformers = pytest.importorskip("transformers", reason="it is not installed; `nox -s adapters` installs it")
    import torch
    from torch.nn import functional

    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "whole_models"))
    import ways

    by_torch, calls = functional.rms_norm, []
    monkeypatch.setattr(functional, "rms_norm", lambda *given: (calls.append(1), by_torch(*given))[1])
    config = transformers.Qwen3MoeConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
        num_hidden_layers=2, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=32, rms_norm_eps=3.0,
    )  # fmt: skip
    model = transformers.Qwen3MoeForCausalLM._from_config(config)
    served, layer = ways.Served(model), model.model.layers[0]
    norms = [model.model.norm, layer.input_layernorm, layer.post_attention_layernorm, layer.self_attn.q_norm]
    for way, expected in (("fp8-block/norms", len(norms)), ("grouped_mm", 0), ("grouped_mm/norms", len(norms))):
        served.by(way)
        calls.clear()
        for number, norm in enumerate(norms, start=1):
            with torch.no_grad():
                norm.weight.fill_(number)
            y = norm(torch.ones(3, len(norm.weight)))
            assert torch.equal(y, torch.full_like(y, number / 2))
        assert len(calls) == expected
    kind = type(model.model.norm)
    monkeypatch.setattr(kind, "forward", kind.forward)
    page = (ROOT / "docs" / "whole-models.md").read_text()
    exec(page.split("```py\n")[1].split("```")[0], {})
    again = kind(32, 3.0)
    calls.clear()
    assert torch.equal(again(torch.ones(3, 32)), torch.full((3, 32), 0.5))
    assert calls


def test_losses_of_whole_models_are_paired(tmp_path: Path) -> None:
    """Every way of a seed starts from the same model and sees the same text: in bf16 losses agree."""
    pytest.importorskip("transformers", reason="it is not installed; `nox -s adapters` installs it")
    output, text = tmp_path / "losses.json", tmp_path / "text.py"
    text.write_bytes((ROOT / "noxfile.py").read_bytes() * 4)
    chosen = ("--way", "bf16", "--way", "fp8-block/linears", "--seeds", "2", "--text", str(text))
    run(
        ROOT / "benchmarks" / "whole_models", "losses", "qwen3-moe", *chosen, "--quick", "--device", "cpu",
        "--output", str(output),
    )  # fmt: skip
    record = json.loads(output.read_text())
    held_out = {(row["way"], row["seed"]): row["held_out_loss"] for row in record["rows"]}
    assert set(held_out) == {(way, seed) for way in ("grouped_mm", "bf16", "fp8-block/linears") for seed in (0, 1)}
    for seed in (0, 1):
        assert abs(held_out["bf16", seed] - held_out["grouped_mm", seed]) <= 2.0**-8 * held_out["grouped_mm", seed]
    assert held_out["grouped_mm", 0] != held_out["grouped_mm", 1]
    assert [gap["way"] for gap in record["gaps"]] == ["bf16", "fp8-block/linears"]
    assert all(len(gap["per_seed_percent"]) == 2 for gap in record["gaps"])


@pytest.mark.parametrize("window", ["full_attention", "sliding_attention"])
def test_a_sink_is_one_more_key(window: str) -> None:
    """gpt-oss's attention by scaled_dot_product_attention has eager attention's results and gradients, in fp32."""
    transformers = pytest.importorskip("transformers", reason="it is not installed; `nox -s adapters` installs it")
    import torch

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks" / "whole_models"))
        import sinks
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    torch.manual_seed(seed)
    config = transformers.GptOssConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        num_hidden_layers=1, num_local_experts=2, num_experts_per_tok=1, sliding_window=5, layer_types=[window],
    )  # fmt: skip
    tokens, found = torch.randint(32, (2, 17)), []
    model = transformers.GptOssForCausalLM._from_config(config, attn_implementation="eager")
    torch.nn.init.normal_(model.model.layers[0].self_attn.sinks)
    for name in ("eager", sinks.register()):
        model.set_attn_implementation(name)
        model.zero_grad()
        logits = model(tokens, use_cache=False).logits
        logits.square().sum().backward()
        found.append([logits, *(parameter.grad for parameter in model.model.layers[0].self_attn.parameters())])
    # fp32's rounding, 2^-24, for each term of the sums between q and the logits: scores, softmax and values over the
    # keys and the sink, the projection, the logits
    terms = config.head_dim + 2 * (tokens.shape[1] + 1) + config.hidden_size + config.vocab_size
    for theirs, ours in zip(*found, strict=True):
        assert (ours - theirs).abs().max() <= terms * 2.0**-24 * theirs.abs().max()
