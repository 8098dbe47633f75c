"""Several ranks beside FSDP2: scales that are reduced, tensor and expert parallelism, sharded checkpoints."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import ranks as pool
import torch
import torch.distributed as dist
from rank_work.distributed import (
    column_and_row,
    columns_and_shards,
    distributed_rows,
    expert_parallel,
    load_parts,
    parallel_mlp,
    resume_with_the_optimizer,
    save_and_reshard,
    scales_with_an_empty_rank,
    states,
)
from rank_work.fsdp import data, layer_of
from ranks import WORLD, Ranks

from octavo import MXFP8, PRESETS, BlockScaling
from octavo_torch import (
    ExpertExchange,
    GroupedColumnParallel,
    GroupedLinear,
    GroupedMLP,
    GroupedMLPParallel,
    GroupedRowParallel,
    add_lora,
    load_distributed,
    merge_lora,
    quantized_parameters,
    save_distributed,
)


def test_scales_are_reduced_over_ranks(ranks: Ranks) -> None:
    """`update_scales(group)` gives every rank the scales of one process with all tokens, a rank without tokens included
    (faults.md 54, 55)."""
    assert ranks(scales_with_an_empty_rank) == [(True, True)] * WORLD


def test_a_rank_that_leaves_out_a_collective_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog of these tests ends a deadlock: it proves nothing unless it can bite."""
    monkeypatch.setattr(pool, "WATCHDOG_SECONDS", 2.0)
    alone = Ranks()
    start = time.monotonic()
    with pytest.raises(AssertionError, match=r"ranks .* did not answer within 2 s: states"):
        alone(states)
    assert time.monotonic() - start < pool.START_SECONDS


def test_column_and_row_parallel_layers(ranks: Ranks) -> None:
    """y, dx, weights' and biases' gradients of two layers in a row are those of one process, bit for bit where sums are
    exact; a bias counts once."""
    for answer in ranks(column_and_row):
        assert answer == [True] * 6


def test_a_parallel_mlp(ranks: Ranks) -> None:
    """Gate and up projection that take turns are split together; what cannot be split is refused."""
    for *differences, gated, uneven, blocks, other in ranks(parallel_mlp):
        assert differences == [True] * 7
        assert "create the GroupedMLP with interleave=" in gated
        assert "126" in uneven
        assert f"128 in blocks of 64 for {WORLD} ranks; give a multiple of {64 * WORLD}" in blocks
        assert "is for GroupedMLP" in other


def test_rows_that_are_distributed_are_refused(ranks: Ranks) -> None:
    """With what to give, as of ColwiseParallel(use_local_output=False); they had failed in a kernel's operator."""
    told = "x is a DTensor (R); give this rank's part of it, such as its to_local()"
    assert ranks(distributed_rows) == [[told] * 5] * WORLD


def test_layers_that_are_not_split_are_refused() -> None:
    """Adapters, whose sums had another width than their layer's part; gradients that autograd does not carry, which
    failed in the first call; and codes."""
    layer, mlp = GroupedLinear(2, 64, 64, recipe=None), GroupedMLP(2, 64, 64, activation="silu", recipe=None)
    for module, style in ((layer, GroupedColumnParallel()), (layer, GroupedRowParallel()), (mlp, GroupedMLPParallel())):
        style.check(module, 2)
        add_lora(module, 4)
        with pytest.raises(ValueError, match=rf"the {type(module).__name__} has adapters, .*; end them by merge_lora"):
            style.check(module, 2)
        merge_lora(module)
    for option, how in (("main_grad", {"main_grad": "accumulate"}), ("delay_wgrad", {"delay_wgrad": True})):
        for made in (
            GroupedLinear(2, 64, 64, recipe=None, **how),  # type: ignore[arg-type]
            GroupedMLP(2, 64, 64, activation="silu", recipe=None, **how),  # type: ignore[arg-type]
        ):
            split = GroupedColumnParallel() if isinstance(made, GroupedLinear) else GroupedMLPParallel()
            with pytest.raises(ValueError, match=f"has {option}, and the gradient .* create the layer without it"):
                split.check(made, 2)
    with quantized_parameters("fp8-block"):
        codes = GroupedLinear(2, 128, 128, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="weight is codes alone, which are not split; create the layer with values"):
        GroupedRowParallel().check(codes, 2)


def test_tensor_parallel_shards_are_gathered_as_codes(ranks: Ranks) -> None:
    """Over two axes of a mesh: a column-parallel layer whose part is sharded by FSDP2."""
    assert ranks(columns_and_shards) == [[True, True, True]] * WORLD


@pytest.mark.parametrize("recipe", ["bf16", "fp8-block", "mxfp8"])
def test_expert_parallel_tokens_come_back_as_from_one_process(recipe: str, ranks: Ranks) -> None:
    """Results and gradients of tokens and router weights, bit for bit: no scale spans two groups or the ranks' rows."""
    assert ranks(expert_parallel, recipe) == [[True, True, True]] * WORLD


def test_exchanges_that_do_not_fit() -> None:
    """Sizes that ranks do not divide, or are none."""
    group = dist.ProcessGroup(0, 4)
    for sizes, needed in ((torch.ones(6, dtype=torch.int64), "6 experts for 4 ranks"), ([1, 2], "give int32 or int64")):
        with pytest.raises(ValueError, match=needed):
            ExpertExchange(sizes, group)


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_a_sharded_checkpoint_loads_elsewhere(recipe: str, tmp_path: Path, ranks: Ranks) -> None:
    """From four ranks along dim 1 to four along dim 0, to one process, and to one parameter per group: the same bits
    (faults.md 47, 49, 51). There is no pickle in the folder."""
    for answer in ranks(save_and_reshard, str(tmp_path), recipe):
        assert all(answer), answer
    assert {path.suffix for path in tmp_path.iterdir()} == {".safetensors"}
    one = GroupedLinear(4, 512, 512, bias=True, recipe=PRESETS[recipe], dtype=torch.bfloat16, seed=9)
    parts = GroupedLinear(
        4, 512, 512, bias=True, recipe=PRESETS[recipe], dtype=torch.bfloat16, seed=9, per_group_parameters=True
    )
    start = layer_of(PRESETS[recipe])
    for layer in (one, parts):
        load_distributed(layer, tmp_path)
    assert not torch.equal(one.weight, start.weight)
    assert torch.equal(one(data(2), [11, 0, 17, 6]), parts(data(2), [11, 0, 17, 6]))
    with pytest.raises(ValueError, match="create the module with the recipe"):
        load_distributed(GroupedLinear(4, 512, 512, bias=True, recipe=BlockScaling(), dtype=torch.bfloat16), tmp_path)


def test_torchs_own_checkpoints_resume_elsewhere(tmp_path: Path, ranks: Ranks) -> None:
    """State dicts of weights that are gathered as codes hold ordinary tensors; the optimizer resumes (faults.md 49)."""
    assert ranks(resume_with_the_optimizer, str(tmp_path)) == [[True, True]] * WORLD


def test_one_process_saves_and_four_ranks_load(tmp_path: Path, ranks: Ranks) -> None:
    """One parameter a group, saved by one process, into shards along dims 0, 1 and 2."""
    torch.manual_seed(7)
    parts = GroupedLinear(4, 512, 512, bias=True, recipe=BlockScaling(), per_group_parameters=True)
    save_distributed(parts, tmp_path)
    assert ranks(load_parts, str(tmp_path)) == [[True] * 6] * WORLD


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    """An array that the checkpoint lacks does not silently keep its values (faults.md 51)."""
    save_distributed(GroupedLinear(2, 16, 16, recipe=MXFP8()), tmp_path)
    with pytest.raises(ValueError, match=r"lacks \['bias'\]"):
        load_distributed(GroupedLinear(2, 16, 16, bias=True, recipe=MXFP8()), tmp_path)


def test_styles_are_for_their_layers() -> None:
    """One parameter per group is not a matrix to split."""
    layer = GroupedLinear(2, 16, 16, per_group_parameters=True)

    class Mesh:
        def size(self) -> int:
            return 2

    with pytest.raises(ValueError, match="create the layer without per_group_parameters"):
        GroupedRowParallel()._apply(layer, Mesh())  # type: ignore[arg-type]
