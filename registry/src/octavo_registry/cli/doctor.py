"""`octavo doctor`: what is installed, what of it works, and a self-test."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, NamedTuple

import typer

import octavo_registry
from octavo_registry.cli import selftest
from octavo_registry.cli.commands import GROUP as COMMANDS
from octavo_registry.cli.commands import Command, external_commands
from octavo_registry.cli.errors import BROKEN
from octavo_registry.cli.notes import GROUP as NOTES
from octavo_registry.cli.notes import Note, notes
from octavo_registry.cli.output import Json, print_json, print_line, print_table
from octavo_registry.cli.tracebacks import tracebacks
from octavo_registry.contract.frameworks import Device
from octavo_registry.discovery import bridges, loader
from octavo_registry.discovery.bridges import FrameworkRecord
from octavo_registry.discovery.entry_points import unread_groups
from octavo_registry.discovery.guard import Fault, guard
from octavo_registry.discovery.install import how_to_install, installed_version, what_is_missing
from octavo_registry.discovery.names import FRONT_ENDS
from octavo_registry.discovery.records import BackendRecord
from octavo_registry.dispatch.match import within_arch
from octavo_registry.dispatch.preference import ENVIRONMENT, REST
from octavo_registry.dispatch.untried import untried_lines

DISTRIBUTIONS = (
    "octavo",
    "octavo-core",
    "octavo-registry",
    "octavo-numerics",
    "octavo-torch",
    "octavo-jax",
    "octavo-native",
    "octavo-torch-native",
    "octavo-torch-cudagraph",
    "octavo-torch-triton",
    "octavo-jax-native",
    "octavo-jax-triton",
    "octavo-triton",
    "octavo-conformance",
    "octavo-bench",
    "torch",
    "jax",
    "jaxlib",
    "triton",
    "jax-triton",
    "numpy",
    "ml_dtypes",
)


@dataclass(frozen=True, slots=True)
class Report:
    """All that doctor finds out, as rows; `broken` holds one sentence for each thing that does not work."""

    environment: dict[str, str]
    versions: dict[str, str | None]
    plugins: list[dict[str, Any]]
    backends: list[dict[str, Any]]
    frameworks: list[dict[str, Any]]
    commands: list[dict[str, Any]]
    notes: list[dict[str, Any]]
    selftest: list[dict[str, Any]]
    broken: list[str]


class _FrontEnd(NamedTuple):
    """A framework's front end: the devices and the version that its bridge reports, or the fault that prevents it."""

    record: FrameworkRecord
    devices: Sequence[Device]
    version: str
    fault: str


def _devices(record: FrameworkRecord) -> tuple[Sequence[Device], str, str]:
    """Devices, version and fault of a front end."""
    if record.bridge is None:
        return (), "", record.reason
    try:
        return tuple(guard(record.bridge.devices)), guard(record.bridge.version), ""
    except Fault as fault:
        return (), "", str(fault)


def _preference_fault() -> str:
    """What is wrong with OCTAVO_BACKEND; "" where nothing is. Every plan of a process would raise it."""
    try:
        preference = octavo_registry.current_preference() or ()
    except octavo_registry.UnknownBackendError as error:
        return str(error)
    known = {record.name for record in octavo_registry.backends()}
    unknown = [name for name in preference if name != REST and name not in known]
    if unknown:
        installed = ", ".join(sorted(known)) or "none is installed"
        return f"{ENVIRONMENT}: there is no backend {unknown[0]!r}; known names are {installed}"
    return ""


def _untried(records: Iterable[BackendRecord], seen: Mapping[str, Sequence[Device]]) -> Iterator[Note]:
    """A note for each backend that would serve a device of this machine and has not been run on one like it."""
    for record in records:
        if record.card is not None and record.verdict is None:
            card = record.card
            lines = [line for name, devices in seen.items() for line in untried_lines(card, name, devices)]
            if lines:
                yield Note(record.name, record.distribution, record.version, tuple(lines))


def _slow(records: Iterable[BackendRecord], seen: Mapping[str, Sequence[Device]]) -> Iterator[Note]:
    """A note for each reference backend that comes first on a device of this machine for which there are kernels."""
    working = [(record, record.card) for record in records if record.card is not None and record.verdict is None]
    lines: dict[str, tuple[BackendRecord, dict[str, None]]] = {}
    for framework, devices in seen.items():
        for device in devices:
            serving = [
                (card.priority, record.name, record)
                for record, card in working
                for row in card.capabilities
                if row.framework == framework and row.device == device.kind and within_arch(row, device.arch)
            ]
            if not serving:
                continue
            _, name, first = max(serving, key=lambda one: one[:2])
            missing = what_is_missing(framework, device.kind, device.arch, name, any_backend=True)
            if missing:
                lines.setdefault(name, (first, {}))[1][f"{device.label}: {missing}"] = None
    for name, (record, sentences) in lines.items():
        yield Note(name, record.distribution, record.version, tuple(sentences))


def examine() -> Report:
    """Load everything that is installed, in guards, and try it."""
    broken: list[str] = []
    if fault := _preference_fault():
        broken.append(fault)
    broken += unread_groups((loader.GROUP, bridges.GROUP, COMMANDS, NOTES))
    plugins = octavo_registry.plugins()
    broken += [f"plugin {p.name} of {p.origin}: {p.reason}" for p in plugins if p.status == "broken"]
    records = [record for record in octavo_registry.backends() if record.card is not None]
    broken += [f"backend {r.name} of {r.distribution}: {r.reason}" for r in records if r.verdict == "broken"]
    broken += [line for r in records if r.card is not None for line in octavo_registry.strange_names(r.card)]
    front_ends = [_FrontEnd(record, *_devices(record)) for record in octavo_registry.framework_records()]
    broken += [f"front end {f.record.name} of {f.record.distribution}: {f.fault}" for f in front_ends if f.fault]
    commands = [_command_row(command) for command in external_commands()]
    broken += [f"command {c['name']} of {c['distribution']}: {c['reason']}" for c in commands if c["reason"]]
    seen = {f.record.name: f.devices for f in front_ends}
    remarks = [*notes(), *_untried(records, seen), *_slow(records, seen)]
    broken += [f"note {n.name} of {n.distribution}: {n.reason}" for n in remarks if n.reason]
    outcomes = selftest.run([f.record.bridge for f in front_ends if f.record.bridge is not None and not f.fault])
    broken += [f"self-test of {o.backend} on {o.device}: {o.detail}" for o in outcomes if o.status == "broken"]
    return Report(
        environment={
            "python": platform.python_version(),
            "platform": platform.platform(),
            "executable": sys.executable,
            ENVIRONMENT: os.environ.get(ENVIRONMENT, ""),
        },
        versions={name: installed_version(name) for name in DISTRIBUTIONS},
        plugins=[asdict(plugin) for plugin in plugins],
        backends=[_backend_row(record) for record in records],
        frameworks=[_framework_row(front_end) for front_end in front_ends],
        commands=commands,
        notes=[asdict(note) for note in remarks],
        selftest=[asdict(outcome) for outcome in outcomes],
        broken=broken,
    )


def _backend_row(record: BackendRecord) -> dict[str, Any]:
    return {
        "name": record.name,
        "status": record.verdict or "ok",
        "priority": record.card.priority if record.card else None,
        "distribution": record.distribution,
        "version": record.version,
        "reason": record.reason,
        "summary": record.card.summary if record.card else "",
    }


def _framework_row(front_end: _FrontEnd) -> dict[str, Any]:
    return {
        "name": front_end.record.name,
        "status": "broken" if front_end.fault else "ok",
        "version": front_end.version,
        "distribution": front_end.record.distribution,
        "devices": [
            {"kind": device.kind, "arch": list(device.arch) if device.arch else None, "label": device.label}
            for device in front_end.devices
        ],
        "reason": front_end.fault,
    }


def _command_row(command: Command) -> dict[str, Any]:
    reason = ""
    try:
        command.load()
    except Fault as fault:
        reason = str(fault)
    return {
        "name": command.name,
        "status": "broken" if reason else "ok",
        "distribution": command.distribution,
        "version": command.version,
        "reason": reason,
    }


def doctor(
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Also print tracebacks of what failed in plugins, on stderr.")
    ] = False,
    as_json: Json = False,
) -> None:
    """What is installed, what of it works, what packages say of their builds, and a self-test of every backend.

    Exits with 1 where something that is installed is broken.
    """
    with tracebacks(traceback):
        report = examine()
    if as_json:
        print_json({"healthy": not report.broken, **asdict(report)})
    else:
        _show(report)
    if report.broken:
        raise typer.Exit(BROKEN)


def _show(report: Report) -> None:
    installed = {name: version for name, version in report.versions.items() if version}
    rows = [*report.environment.items(), *installed.items()]
    print_table("Environment", ("what", "value"), [(name, value or "(not set)") for name, value in rows])
    print_table(
        "Plugins",
        ("plugin", "status", "from", "what"),
        [
            (p["name"], p["status"], f"{p['distribution']} {p['version']}", p["reason"] or "backends " + _names(p))
            for p in report.plugins
        ],
    )
    print_table(
        "Backends",
        ("backend", "status", "priority", "what"),
        [(b["name"], b["status"], b["priority"], b["reason"] or b["summary"]) for b in report.backends],
    )
    print_table(
        "Front ends",
        ("framework", "status", "version", "what"),
        [
            (f["name"], f["status"], f["version"], f["reason"] or ", ".join(d["label"] for d in f["devices"]))
            for f in report.frameworks
        ],
    )
    if not report.frameworks:
        for name, distribution in FRONT_ENDS.items():
            print_line(f"  for {name}, {how_to_install(distribution)}")
    print_table(
        "Commands of other packages",
        ("command", "status", "from", "what"),
        [(c["name"], c["status"], f"{c['distribution']} {c['version']}", c["reason"]) for c in report.commands],
    )
    if report.notes:
        print_table(
            "Notes of packages",
            ("package", "what"),
            [(n["name"], line) for n in report.notes for line in n["lines"] or ("broken: " + n["reason"],)],
        )
    if report.versions["octavo-numerics"] is None:
        print_line(f"Self-test: skipped, as it compares with octavo-numerics; {how_to_install('octavo-numerics')}")
    else:
        print_table(
            "Self-test",
            ("backend", "status", "where", "what"),
            [(t["backend"], t["status"], f"{t['framework']}, {t['device']}", t["detail"]) for t in report.selftest],
        )
    if report.broken:
        print_line(f"{len(report.broken)} broken:")
        for sentence in report.broken:
            print_line(f"  {sentence}")
    else:
        print_line("Nothing is broken.")


def _names(plugin: dict[str, Any]) -> str:
    return ", ".join(plugin["backends"]) or "none"
