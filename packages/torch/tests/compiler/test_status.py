"""The status word of a device: made once, and of real memory whoever asks first."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from octavo_torch.compiler import status


def test_the_word_is_real_when_a_trace_asks_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler traces with tensors that have no memory; a word made of those would stay and break later calls."""
    monkeypatch.setattr(status, "_words", {})
    device = torch.device("cpu")
    with FakeTensorMode():
        word = status.status_word(device)
    assert not isinstance(word, FakeTensor)
    assert word is status.status_word(device)
    assert word.tolist() == [0]
