"""`octavo doctor`: what it finds broken, and its exit codes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

import octavo_registry
from octavo_registry import Registry
from octavo_registry.cli import selftest
from octavo_registry.contract.frameworks import Device
from octavo_registry.discovery import install as install_hints
from octavo_registry.discovery.bridges import FrameworkRecord


def test_doctor_of_a_healthy_installation(run: Any) -> None:
    """Exit code 0 and every section; what is not installed is not broken."""
    ran = run("doctor")
    assert ran.code == 0
    for heading in ("Environment", "Plugins", "Backends", "Front ends", "Commands of other packages"):
        assert heading in ran.out.splitlines()
    assert "Nothing is broken." in ran.out
    answer = run("doctor", "--json").json
    assert answer["healthy"] is True
    assert answer["broken"] == []
    assert [backend["name"] for backend in answer["backends"]] == ["a", "b"]


def test_doctor_tells_what_is_broken(run: Any, use: Any, install: Any, discovered: Callable[[], Registry]) -> None:
    """Plugin, front end and command: each broken one is a row and a sentence, and the exit code is 1."""
    install(
        "test-bad",
        {"oct_bad": "raise OSError('libacme.so.2\\x1b[2J not found')"},
        {
            "octavo.backends": {"bad": "oct_bad"},
            "octavo.frameworks": {"worse": "oct_bad:BRIDGE"},
            "octavo.commands": {"worst": "oct_bad:app"},
        },
    )
    use(discovered())
    ran = run("doctor")
    assert ran.code == 1
    assert "3 broken:" in ran.out
    assert "\x1b" not in ran.out
    answer = run("doctor", "--json")
    assert answer.code == 1
    assert answer.json["healthy"] is False
    kinds = [sentence.split()[0] for sentence in answer.json["broken"]]
    assert kinds == ["plugin", "front", "command"]
    assert all("OSError: libacme.so.2" in sentence for sentence in answer.json["broken"])


def test_doctor_has_the_traceback_of_a_plugin(
    run: Any, use: Any, install: Any, discovered: Callable[[], Registry], capsys: pytest.CaptureFixture[str]
) -> None:
    """A vendor needs the file and the line; messages keep one line all the same."""
    install(
        "test-bad",
        {"oct_bad": "def deep():\n    raise OSError('boom')\n\ndeep()"},
        {"octavo.backends": {"bad": "oct_bad"}},
    )
    use(discovered())
    ran = run("doctor", "--traceback")
    assert ran.code == 1
    assert "Traceback (most recent call last)" in ran.err
    assert "oct_bad.py" in ran.err
    assert "in deep" in ran.err
    assert "Traceback" not in ran.out
    use(discovered())
    assert "Traceback" not in run("doctor").err


def test_doctor_names_recipes_that_nobody_defines(run: Any, use: Any, fakes: Any) -> None:
    """A typing error on a card would only mean that the recipe is not served."""
    use(fakes.registry(fakes.plugin("a", rows=[fakes.row(recipes={"current", "rwo"})])))
    ran = run("doctor")
    assert ran.code == 1
    assert "the card of a names the recipe 'rwo', which nobody defines; did you mean row?" in ran.out
    use(fakes.registry(fakes.plugin("a", rows=[fakes.row(framework="pytorch", device="CPU")])))
    ran = run("doctor")
    assert ran.code == 1
    assert "the card of a names the framework 'pytorch'; did you mean torch?" in ran.out
    assert "the card of a names the device 'CPU'; did you mean cpu?" in ran.out
    use(fakes.registry(fakes.plugin("a", rows=[fakes.row(framework="torch", device="cuda:0")])))
    assert "the card of a names the device 'cuda:0'; did you mean cuda?" in run("doctor").out
    use(fakes.registry(fakes.plugin("a", rows=[fakes.row(framework="torch", device="xpu")])))
    assert "did you mean" not in run("doctor").out  # whose front end may be elsewhere


def test_doctor_names_groups_that_nothing_reads(run: Any, install: Any) -> None:
    """Entry points in a misspelt group are invisible: the plugin's author would look everywhere else."""
    install("test-misspelt", {"oct_plugin": ""}, {"octavo.backend": {"zenith": "oct_plugin"}}, version="2.1")
    install("test-another", {"oct_other": ""}, {"other.backends": {"zenith": "oct_other"}})
    ran = run("doctor")
    assert ran.code == 1
    sentence = "has entry points in the group 'octavo.backend', which nothing reads; did you mean octavo.backends?"
    assert f"test-misspelt 2.1 {sentence}" in ran.out
    assert "test-another" not in ran.out


def test_doctor_shows_what_packages_say_of_themselves(run: Any, install: Any) -> None:
    """A compiled package tells which kernels it has; no card or hook could, and the registry imports none of them."""
    install(
        "test-kernels",
        {"oct_kernels": "def lines():\n    return ['kernels for the CPU alone', 'run: make kernels']"},
        {"octavo.doctor": {"test-kernels": "oct_kernels:lines"}},
        version="2.1",
    )
    ran = run("doctor")
    assert ran.code == 0
    assert [line.split(maxsplit=1)[1] for line in ran.out.splitlines() if line.strip().startswith("test-kernels")] == [
        "kernels for the CPU alone",
        "run: make kernels",
    ]
    (note,) = run("doctor", "--json").json["notes"]
    assert (note["distribution"], note["version"], note["reason"]) == ("test-kernels", "2.1", "")


@pytest.mark.parametrize(("others", "said"), [((), True), (("fast",), False)])
def test_doctor_names_the_package_with_kernels_where_a_reference_backend_comes_first(
    run: Any, use: Any, fakes: Any, monkeypatch: pytest.MonkeyPatch, others: tuple[str, ...], said: bool
) -> None:
    """A new user has the reference backend and does not know that there are kernels; who has some is not told."""

    class Bridge:
        def devices(self) -> tuple[Device, ...]:
            return (Device("cpu", None, "CPU"),)

        def version(self) -> str:
            return "2"

    record = FrameworkRecord("torch", "octavo-torch", "1", "a:b", cast(Any, Bridge()))
    monkeypatch.setattr(octavo_registry, "framework_records", lambda: (record,))
    monkeypatch.setattr(selftest, "run", lambda _: [])
    monkeypatch.setattr(install_hints, "installed_version", lambda _: None)
    plugins = [fakes.plugin(name, rows=[fakes.row()]) for name in others]
    use(fakes.registry(fakes.plugin("torch-reference", rows=[fakes.row()], priority=-100), *plugins))
    ran = run("doctor")
    assert ran.code == 0
    sentence = "CPU: torch-reference is exact and slow. octavo-torch-native has compiled kernels for this device"
    assert (sentence in ran.out) == said


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("raise OSError('libacme.so.2 not found')", "OSError: libacme.so.2 not found"),
        ("def lines():\n    raise SystemExit(3)", "SystemExit: 3"),
        ("def lines():\n    return [7]", "gave [7]; a function of octavo.doctor returns a list of sentences"),
        ("def lines():\n    return 'run: make kernels'", "lines gave 'run: make kernels' by itself; a function of"),
        (
            "def lines():\n    print('kernels')",
            "lines gave None; a function of octavo.doctor returns a list of sentences",
        ),
        ("lines = 7", "TypeError: 'int' object is not callable"),
    ],
)
def test_a_note_that_fails_is_broken_and_breaks_nothing(run: Any, install: Any, body: str, reason: str) -> None:
    """Import, call and answer are guarded alike; the exit code is 1."""
    install("test-bad", {"oct_note": body}, {"octavo.doctor": {"sick": "oct_note:lines"}})
    ran = run("doctor", "--json")
    assert ran.code == 1
    (sentence,) = ran.json["broken"]
    assert sentence.startswith("note sick of test-bad: ")
    assert reason in sentence
    assert "sick" in run("doctor").out


def test_doctor_reports_a_bad_environment_variable(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """OCTAVO_BACKEND with anything but names is broken configuration, said before a job starts."""
    monkeypatch.setenv("OCTAVO_BACKEND", "; rm -rf /")
    ran = run("doctor", "--json")
    assert ran.code == 1
    assert "OCTAVO_BACKEND: got '; rm -rf /'" in ran.json["broken"][0]


def test_doctor_reports_a_preference_for_what_is_not_installed(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every plan of such a process would raise; `"*"` and known names are fine."""
    monkeypatch.setenv("OCTAVO_BACKEND", "a,typo,*")
    assert run("doctor", "--json").json["broken"] == [
        "OCTAVO_BACKEND: there is no backend 'typo'; known names are a, b"
    ]


def test_doctors_self_test_compares_bits(use: Any, fakes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend whose bits differ from the definition is broken; one that raises or does not bind is, too, a product
    where it quantizes nothing."""
    np = pytest.importorskip("numpy")

    class Quantized:
        def __init__(self, codes: Any) -> None:
            self.rowwise = codes
            self.rowwise_scale = self.rowwise_global = None
            self.columnwise = self.columnwise_scale = self.columnwise_global = None

    class Numerics:
        @staticmethod
        def quantize(x: Any, spec: Any, sizes: Any) -> Quantized:
            return Quantized(x.astype(np.uint8))

    class Bridge:
        name = "torch"

        def devices(self) -> list[Device]:
            return [Device("cpu", None, "cpu")]

        def from_numpy(self, array: Any, device: str) -> Any:
            return array

        def to_numpy(self, array: Any) -> Any:
            return array

        def quantize(self, x: Any, spec: Any, sizes: Any, *, backend: str) -> Quantized:
            codes = x.astype(np.uint8)
            if backend == "wrong":
                codes[3, 5] ^= 1
            if backend == "raises":
                raise RuntimeError("no kernel image")
            if backend == "unbound":
                octavo_registry.plan(fakes.request(op="quantize", quantizer=spec), backend=backend)
            return Quantized(codes)

    monkeypatch.setattr(selftest, "definition", lambda: Numerics)
    plugins = [fakes.plugin(name) for name in ("right", "wrong", "raises")]
    products = {"rows": [fakes.row(ops={"fprop", "dgrad"}, recipes={"row"})]}
    plugins += [
        fakes.plugin("multiplies", **products),
        fakes.plugin("none", fakes.Backend(KeyError("tile")), **products),
    ]
    use(fakes.registry(*plugins, fakes.plugin("unbound", fakes.Backend(OSError("libacme.so.2 not found")))))
    bridge: Any = Bridge()
    outcomes = {outcome.backend: outcome for outcome in selftest.run([bridge])}
    assert outcomes["right"].status == "ok"
    assert outcomes["wrong"].status == "broken"
    assert "rowwise differs from the definition in 1 bytes, first at [3, 5]" in outcomes["wrong"].detail
    assert outcomes["raises"].detail == "RuntimeError: no kernel image"
    assert outcomes["unbound"].detail == "OSError: libacme.so.2 not found"  # and no verdict on the others
    assert (outcomes["multiplies"].status, outcomes["multiplies"].detail) == ("ok", "binds fprop in row")
    assert (outcomes["none"].status, outcomes["none"].detail) == ("broken", "KeyError: 'tile'")


def test_a_failed_self_test_is_broken(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong bits are a fault of the installation: a sentence under "broken", and exit code 1."""
    failed = selftest.Outcome("a", "torch", "cpu", "broken", "rowwise differs from the definition in 1 bytes")
    monkeypatch.setattr(selftest, "run", lambda bridges: [failed])
    ran = run("doctor", "--json")
    assert ran.code == 1
    assert ran.json["broken"] == ["self-test of a on cpu: rowwise differs from the definition in 1 bytes"]
