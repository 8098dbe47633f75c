"""The text: the same bits for every recipe, framework and run."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from octavo_cli.errors import InputError
from octavo_cli.train.data import read_corpus


def test_batches_depend_on_seed_and_step_alone(text_file: Path, seed: int) -> None:
    """Recipes are paired: whatever ran before, step n of a seed sees the same tokens."""
    first, again = read_corpus(text_file, 32), read_corpus(text_file, 32)
    later = first.batch(seed, 7, 4, 32)
    for step in range(3):
        first.batch(seed, step, 4, 32)
    assert np.array_equal(first.batch(seed, 7, 4, 32), later)
    assert np.array_equal(again.batch(seed, 7, 4, 32), later)
    assert not np.array_equal(first.batch(seed + 1, 7, 4, 32), later)
    assert not np.array_equal(first.batch(seed, 8, 4, 32), later)


def test_parts_are_disjoint_and_hold_every_byte(text_file: Path) -> None:
    """Held-out text is never trained on, and no byte of the file is lost."""
    corpus = read_corpus(text_file, 32)
    raw = text_file.read_bytes()
    assert len(corpus.train) + len(corpus.held_out) == len(raw)
    values = np.frombuffer(corpus.vocabulary, np.uint8)
    chunks = [raw[i : i + 4096] for i in range(0, len(raw), 4096)]
    assert values[corpus.held_out].tobytes() == b"".join(chunks[9::10])
    assert values[corpus.train].tobytes() == b"".join(c for i, c in enumerate(chunks) if i % 10 != 9)


def test_held_out_windows_cover_the_held_out_text(text_file: Path) -> None:
    """First and last window touch both ends; a target is the token after its input."""
    corpus = read_corpus(text_file, 16)
    windows = corpus.evaluation(50, 16)
    assert windows.shape == (50, 17)
    assert np.array_equal(windows[0], corpus.held_out[:17])
    assert np.array_equal(windows[-1], corpus.held_out[-17:])


def test_any_bytes_are_a_text(tmp_path: Path, seed: int) -> None:
    """No encoding is assumed."""
    path = tmp_path / "bytes.bin"
    path.write_bytes(np.random.default_rng(seed).integers(0, 256, 60_000, np.uint8).tobytes())
    assert read_corpus(path, 32).train.max() < 256


def test_unigram_loss_is_the_entropy_of_byte_frequencies(text_file: Path) -> None:
    """Against a direct computation on the whole held-out text."""
    corpus = read_corpus(text_file, 16)
    tokens = corpus.held_out[: 16 * 100 + 1]
    counts = np.bincount(corpus.train, minlength=len(corpus.vocabulary)) + 1
    expected = -np.mean([np.log(counts[t] / counts.sum()) for t in tokens[1:]])
    assert corpus.unigram_loss(tokens[None]) == pytest.approx(expected, rel=1e-12)


def test_a_python_without_the_default_text_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """pydoc_data is not in every build of Python."""
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(InputError, match="give --text FILE"):
        read_corpus(None, 32)
