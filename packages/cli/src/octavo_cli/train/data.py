"""Text as bytes, split once, sampled from a seed: the same bits for every recipe and in both frameworks."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from octavo_cli.errors import InputError

Tokens = NDArray[np.int32]

DEFAULT_TEXT = "pydoc_data.topics"
"""The language reference that `help()` prints: real English that ships with Python."""

_CHUNK = 4096
_HELD_OUT_EVERY = 10
_MAX_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Corpus:
    """Bytes of a text, renumbered by the sorted set of those that occur.

    The text is cut into chunks of 4096 bytes; every tenth is held out, so that both parts cover the whole text.

    train, held_out    int32 token ids
    vocabulary         the byte values behind the ids
    """

    source: str
    sha256: str
    train: Tokens
    held_out: Tokens
    vocabulary: bytes

    def batch(self, seed: int, step: int, sequences: int, context: int) -> Tokens:
        """[sequences, context + 1] training tokens: a function of the arguments alone, whatever ran before."""
        draw = np.random.Generator(np.random.Philox(key=[seed, step]))
        starts = draw.integers(0, len(self.train) - context, size=sequences)
        return _windows(self.train, starts, context)

    def evaluation(self, sequences: int, context: int) -> Tokens:
        """[sequences, context + 1] held-out tokens, evenly spaced: the same ones for every seed and recipe."""
        starts = np.linspace(0, len(self.held_out) - context - 1, sequences).astype(np.int64)
        return _windows(self.held_out, starts, context)

    def unigram_loss(self, tokens: Tokens) -> float:
        """Nats a byte of a model that knows byte frequencies and nothing else, on what `tokens` asks to predict."""
        counts = np.bincount(self.train, minlength=len(self.vocabulary)) + 1.0
        return float(-np.log(counts / counts.sum())[tokens[:, 1:]].mean())


def _windows(tokens: Tokens, starts: NDArray[np.int64], context: int) -> Tokens:
    windows: Tokens = tokens[starts[:, None] + np.arange(context + 1)]
    return windows


def read_corpus(path: Path | None, context: int) -> Corpus:
    """The corpus of a text file, or of `pydoc_data.topics`; `InputError` if it is missing, unreadable or too short."""
    raw = _default_text() if path is None else _read(path)
    return corpus_of(DEFAULT_TEXT if path is None else path.name, raw, context)


def corpus_of(source: str, raw: bytes, context: int) -> Corpus:
    """The corpus of a text that has been read; `InputError`, which calls it `source`, if it is too short."""
    values = np.frombuffer(raw, dtype=np.uint8)
    vocabulary = np.unique(values)
    ids = np.searchsorted(vocabulary, values).astype(np.int32)
    held_out = (np.arange(len(ids)) // _CHUNK) % _HELD_OUT_EVERY == _HELD_OUT_EVERY - 1
    needed = max(_CHUNK * _HELD_OUT_EVERY, (context + 1) * _HELD_OUT_EVERY)
    if len(raw) < needed or held_out.sum() <= context:
        raise InputError(f"{source} has {len(raw)} bytes of text; training needs at least {needed}: give a longer text")
    return Corpus(source, hashlib.sha256(raw).hexdigest(), ids[~held_out], ids[held_out], vocabulary.tobytes())


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            raw = stream.read(_MAX_BYTES + 1)
    except OSError as error:
        raise InputError(f"--text {path}: cannot be read ({error.strerror or error})") from None
    if len(raw) > _MAX_BYTES:
        raise InputError(f"--text {path}: larger than {_MAX_BYTES} bytes; give a part of it")
    return raw


def _default_text() -> bytes:
    try:
        topics: dict[str, str] = import_module("pydoc_data.topics").topics
    except (ImportError, AttributeError):
        raise InputError(f"this Python was built without {DEFAULT_TEXT}, the default text; give --text FILE") from None
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()
