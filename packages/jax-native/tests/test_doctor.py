"""`octavo doctor` reads what XLA_FLAGS does to Octavo's calls: nothing in a program tells it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from octavo_jax_native.doctor import ADVICE, flags, lines

CASES = {
    "not named": ("--xla_dump_to=there", ["does not name them", ADVICE]),
    "advice": (ADVICE, ["records FUSION, CUBLAS, CUSTOM_CALL in rows of 1 or more; Octavo's calls are among them"]),
    "added": ("--xla_gpu_enable_command_buffer=+CUSTOM_CALL", ["default; Octavo's calls are among them", "=1 records"]),
    "left out": ("--xla_gpu_enable_command_buffer=FUSION,CUBLAS", ["add CUSTOM_CALL to --xla_gpu_enable_command"]),
    "off": ("--xla_gpu_enable_command_buffer=", ["turns them off"]),
    "taken out": ("--xla_gpu_enable_command_buffer=-CUSTOM_CALL", ["add CUSTOM_CALL"]),
}


@pytest.mark.parametrize("case", CASES)
def test_what_the_flags_do(case: str) -> None:
    """A sentence each, with what to do where launches are not recorded."""
    text, expected = CASES[case]
    told = lines({"XLA_FLAGS": text})
    assert len(told) == len(expected)
    for line, part in zip(told, expected, strict=True):
        assert part in line
    assert lines({})[1].count(ADVICE) == 1


def test_flags_are_read_as_xla_reads_them() -> None:
    """Quoted values; the last of two."""
    text = "--a=1 --xla_gpu_enable_command_buffer='FUSION, CUSTOM_CALL' --a=2"
    assert flags(text) == {"a": "2", "xla_gpu_enable_command_buffer": "FUSION, CUSTOM_CALL"}


def test_doctor_imports_no_jax() -> None:
    """Reading an environment variable starts no framework."""
    program = (
        "import sys, octavo_jax_native.doctor as d; d.lines(); assert not {'jax', 'octavo_native'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
