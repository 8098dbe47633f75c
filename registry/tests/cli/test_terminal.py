"""The command on a terminal: nothing is cropped at any width, and what does not fit side by side becomes blocks."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import unicodedata
from collections.abc import Callable

import pytest

WIDTHS = (60, 80, 120)
PROGRAM = """
from octavo_registry.cli.output import print_table
print_table(
    "fprop in mxfp8 for torch on cuda (sm_90), w as [G, K, N]",
    ("backend", "verdict", "from", "reason"),
    [
        ("torch-native", "chosen", "octavo-torch-native 0.1.0", "ranks above torch-reference by priority, 100 over 0"),
        ("torch-cudagraph", "refused", "octavo-torch-cudagraph 0.1.0", "k is 7170, and its cuda GEMMs take multiples"),
    ],
)
print_table(
    "small (4, 64, 64, 128), even: forward + backward in torch",
    ("recipe", "in", "ms (10-90 %)", "TFLOP/s", "own / it", "bf16 / it", "goal", "backends"),
    [("mxfp8", "torch", "0.857 (0.811-0.902)", "0.00367", "121.81x", "1.06x", "-", "torch-reference")],
)
print_table("Recipes", ("name", "fingerprint"), [("bf16", "0123456789abcdef"), ("a" * 200, "fedcba9876543210")])
"""
WORDS = (
    *(
        "torch-cudagraph",
        "octavo-torch-cudagraph 0.1.0",
        "121.81x",
        "0.857 (0.811-0.902)",
        "0.00367",
        "torch-reference",
    ),
    *("backends", "reason", "0123456789abcdef", "fedcba9876543210"),
)
SENTENCES = (
    "ranks above torch-reference by priority, 100 over 0",
    "k is 7170, and its cuda GEMMs take multiples",
)


def on_a_terminal(code: str, width: int, **environment: str) -> str:
    """What `code` writes to a pseudo-terminal of that width, without colours."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    clean = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=child,
        stdout=child,
        stderr=child,
        env=clean | {"TERM": "xterm-256color"} | environment,
    )
    os.close(child)
    read = b""
    while True:
        try:
            part = os.read(parent, 1 << 16)
        except OSError:  # Linux ends a terminal so
            break
        if not part:
            break
        read += part
    os.close(parent)
    assert process.wait(60) == 0, read.decode()
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", read.decode()).replace("\r\n", "\n")


def columns(line: str) -> int:
    """Columns of a terminal that a line takes."""
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in line)


@pytest.mark.parametrize(
    ("width", "environment"),
    [*((width, {}) for width in WIDTHS), (60, {"NO_COLOR": "1"}), (120, {"TERM": "dumb"})],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else str(value),
)
def test_nothing_is_cropped(width: int, environment: dict[str, str]) -> None:
    """Every value is whole in one line; sentences may wrap between words; no line is wider than the terminal, with
    colours or without."""
    text = on_a_terminal(PROGRAM, width, **environment)
    for word in WORDS:
        # plain headers are in capitals
        assert any(word.lower() in line.lower() for line in text.splitlines()), f"{word!r} is cut:\n{text}"
    together = "".join(text.split())
    for sentence in SENTENCES:
        for word in sentence.split():
            assert word in text, f"{word!r} is cut at {width} columns:\n{text}"
    assert "a" * 200 in together
    assert max(map(columns, text.splitlines())) <= width


def test_a_wide_terminal_has_tables_and_a_narrow_one_blocks() -> None:
    """A table is read down its columns where it fits."""
    wide, narrow = on_a_terminal(PROGRAM, 140), on_a_terminal(PROGRAM, 60)
    assert re.search(r"recipe +in +ms \(10-90 %\) +TFLOP/s", wide)
    assert re.search(r"^ mxfp8\s*\n +in +torch", narrow, re.MULTILINE)


@pytest.mark.parametrize("width", WIDTHS)
def test_commands_fit_the_terminal(width: int, run_recipes: Callable[[int], str]) -> None:
    """`octavo recipes list`: fingerprints keep their 16 digits, and the last column is there."""
    text = run_recipes(width)
    assert len(set(re.findall(r"\b[0-9a-f]{16}\b", text))) >= 12
    assert "quantized GEMMs" in text
    assert max(map(columns, text.splitlines())) <= width


@pytest.fixture
def run_recipes() -> Callable[[int], str]:
    """`octavo recipes list` on a terminal of a width."""
    code = "import sys; sys.argv = ['octavo', 'recipes', 'list']; from octavo_registry.cli import main; main()"
    return lambda width: on_a_terminal(code, width)
