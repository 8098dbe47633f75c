"""DistributedDataParallel around grouped layers: gradients that come later, scales of all ranks, refusals."""

from __future__ import annotations

from rank_work.data_parallel import coded_steps, delayed_gradients, main_grads, refusals, scales
from ranks import Ranks


def test_delayed_gradients_are_reduced(ranks: Ranks) -> None:
    """`backward_dw()` runs DDP's hooks, once each: the mean over ranks and microbatches, as without `delay_wgrad`."""
    for answer in ranks(delayed_gradients):
        assert len(answer) == 2 * 3 * (2 + 2 * 3)
        assert all(answer)


def test_a_wrapper_that_would_miss_them_is_refused(ranks: Ranks) -> None:
    """DDP that counts such a weight out, and FSDP2, which reduces in backward: nothing trains apart in silence."""
    for unused, static, *fsdp in ranks(refusals):
        assert "DistributedDataParallel(find_unused_parameters=True)" in unused
        assert "DistributedDataParallel(static_graph=True)" in static
        assert len(fsdp) == 2
        assert all("weight1 is sharded and delay_wgrad is True" in told for told in fsdp)


def test_main_grad_that_nobody_reduces_is_refused(ranks: Ranks) -> None:
    """DDP would reduce the zeros that stand for it, and ranks would train apart; what it does not reduce is allowed."""
    for *refused, unsynced, ignored in ranks(main_grads):
        assert len(refused) == 3
        assert all("DistributedDataParallel, which reduces .grad, where zeros stand for" in told for told in refused)
        assert unsynced is None
        assert ignored is None


def test_delayed_scaling_sees_the_rows_of_all_ranks(ranks: Ranks) -> None:
    """`update_scales(group)` after microbatches; the buffers that DDP sends out before a forward take nothing away."""
    assert all(all(answer) for answer in ranks(scales))


def test_weights_that_are_codes_train_on_reduced_gradients(ranks: Ranks) -> None:
    """DDP reduces the gradient that a CodedWeight receives, and each rank's master takes the same step."""
    assert all(all(answer) for answer in ranks(coded_steps))
