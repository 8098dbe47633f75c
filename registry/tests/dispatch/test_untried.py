"""Rows that say that nobody has run them: repeated wherever a user may take them for a promise."""

from __future__ import annotations

from octavo_registry.contract.cards import BackendCard, Capability
from octavo_registry.contract.frameworks import Device
from octavo_registry.dispatch.untried import untried_lines, untried_words

COMMON = {"ops": frozenset({"fprop"}), "recipes": frozenset({"block"}), "framework": "torch", "device": "cuda"}
RUN = Capability(**COMMON, min_arch=(9, 0), max_arch=(9, 0))
COMPILED = Capability(**COMMON, min_arch=(10, 0), max_arch=(10, 9), untried="compiled for sm_100")
CARD = BackendCard(name="acme", api_level=5, capabilities=(RUN, COMPILED, COMPILED))


def test_a_row_that_has_run_says_nothing() -> None:
    """No words of doubt about what the suite has passed."""
    assert untried_words(RUN, "acme") == ""


def test_the_sentence_has_the_command_that_would_tell() -> None:
    """What was done in the place of running, and how to find out."""
    words = untried_words(COMPILED, "acme")
    assert words.startswith("compiled for sm_100")
    assert "`octavo conform acme --report acme.json`" in words


def test_doctor_speaks_of_the_devices_that_are_here() -> None:
    """A line for the one of sm_100, once; none for Hopper, the CPU or another framework."""
    devices = [Device("cpu", None, "CPU"), Device("cuda", (9, 0), "H100"), Device("cuda", (10, 0), "B200")]
    (line,) = untried_lines(CARD, "torch", devices)
    assert line.startswith("B200: compiled for sm_100")
    assert untried_lines(CARD, "jax", devices) == ()
    assert untried_lines(CARD, "torch", devices[:2]) == ()
