"""`octavo compare RUN1 RUN2`: two results of `octavo train`, or two of `octavo bench`, side by side."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo_cli.errors import InputError, check_version
from octavo_registry.cli.output import print_json, print_line, print_table

_IDENTITY = (
    *("case", "kind", "peer", "gemm", "way", "shape", "sizes", "grouping", "choices", "backend", "backends"),
    *("weights_reused", "groups", "threads", "devices", "route", "payload", "policy", "operand", "recipe", "tile"),
)
"""Fields of a benchmark's row that say what was measured, in the order in which they are shown."""


_FACTS = (
    *("date", "command", "framework", "device", "dtype", "seed", "repeats"),
    *("config", "text", "versions", "machine", "backends"),
)
"""What a file says of its run."""


@dataclass(frozen=True, slots=True)
class Time:
    """Microseconds of one row: a median and, where the file has them, the lowest and the highest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Time | None:
        """The row's time, from `us` or from the first field whose name ends in `_us`; None without."""
        value = row.get("us")
        if value is None:
            value = next((row[name] for name in sorted(row) if name.endswith("_us") and row[name] is not None), None)
        if isinstance(value, Mapping) and isinstance(value.get("median"), int | float):
            median = float(value["median"])
            return cls(median, float(value.get("low", median)), float(value.get("high", median)))
        return cls(float(value), float(value), float(value)) if isinstance(value, int | float) else None


def compare(
    first: Annotated[Path, typer.Argument(help="A run's folder or curves.json, or a benchmark's JSON.")],
    second: Annotated[Path, typer.Argument(help="Another one of the same kind.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, errors too.")] = False,
) -> None:
    """Compare two runs of `octavo train` or two results of `octavo bench`: what differs in setting and in outcome.

    Times are compared with their spread: a row whose ranges overlap, or that has none, is not called faster or slower.
    """
    left, right = _read(first), _read(second)
    kinds = [_kind(path, content) for path, content in ((first, left), (second, right))]
    if kinds[0] != kinds[1]:
        raise InputError(f"{first} is a result of {kinds[0]} and {second} of {kinds[1]}; compare two of one kind")
    if kinds[0] == "octavo bench":
        _check_comparable((first, left), (second, right))
    settings = _settings(left, right)
    rows = _trained(left, right) if kinds[0] == "octavo train" else _timed(left, right)
    if as_json:
        named = [{"setting": name, "first": a, "second": b} for name, a, b in settings]
        print_json({"schema_version": 1, "kind": kinds[0], "settings": named, "rows": rows})
        return
    print_table("Settings that differ", ("setting", "first", "second"), settings)
    (_print_trained if kinds[0] == "octavo train" else _print_timed)(rows)


def _read(path: Path) -> dict[str, Any]:
    file = path / "curves.json" if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{file}: {error.strerror}; name a run's folder or a result file") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file} is not valid JSON ({error}); name a result of octavo train or octavo bench") from None
    if not isinstance(content, dict):
        raise InputError(f"{file} holds a {type(content).__name__}; name a result of octavo train or octavo bench")
    check_version(str(file), content)
    return content


def _kind(path: Path, content: Mapping[str, Any]) -> str:
    parts = {"runs": list, "held_out_loss": Mapping, "gaps": list, "weights": Mapping}
    defaults: dict[str, Any] = {"gaps": [], "weights": {}}
    if all(isinstance(content.get(name, defaults.get(name)), kind) for name, kind in parts.items()):
        return "octavo train"
    if any(True for _ in _rows(content)):
        return "octavo bench"
    raise InputError(f"{path} has neither runs of octavo train nor times of octavo bench; name a result of one of them")


def _check_comparable(first: tuple[Path, dict[str, Any]], second: tuple[Path, dict[str, Any]]) -> None:
    """InputError for results without a row in common, which says how they differ."""
    (path, left), (other, right) = first, second
    ours, theirs = dict(_rows(left)), dict(_rows(right))
    if ours.keys() & theirs.keys():
        return
    commands = [content.get("command") for content in (left, right)]
    kinds = [" ".join(command.split()[:3]) if isinstance(command, str) else "" for command in commands]
    if all(kinds) and kinds[0] != kinds[1]:
        raise InputError(f"{path} is a result of {kinds[0]} and {other} of {kinds[1]}; compare two of one command")
    examples = [" ".join(next(iter(rows))[1:]) or "a row without a name" for rows in (ours, theirs)]
    raise InputError(
        f"{path} and {other} have no row in common: the first row of one is {examples[0]!r}, of the other "
        f"{examples[1]!r}; compare results of one command, of the same shapes and backends"
    )


def _settings(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """What the two files say of themselves and do not agree on."""
    first, second = dict(_facts(left)), dict(_facts(right))
    names = [*first, *(name for name in second if name not in first)]
    pairs = ((name, first.get(name, "-"), second.get(name, "-")) for name in names)
    return [(name, str(a), str(b)) for name, a, b in pairs if a != b]


def _facts(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in _FACTS:
        value = content.get(name)
        if isinstance(value, Mapping):
            yield from ((f"{name}.{part}", inner) for part, inner in value.items() if not isinstance(inner, Mapping))
        elif value is not None:
            yield name, value
    recipes = content.get("recipes")
    if isinstance(recipes, Mapping):
        for name, recipe in recipes.items():
            if isinstance(recipe, Mapping):
                yield f"recipe {name}", recipe.get("fingerprint")


def _trained(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each recipe of either run, in order."""
    names = dict.fromkeys([*left["held_out_loss"], *right["held_out_loss"]])
    rows = []
    for name in names:
        losses = [content["held_out_loss"].get(name) for content in (left, right)]
        gaps = [_gap(content, name) for content in (left, right)]
        row: dict[str, Any] = {"recipe": name, "held_out_loss": losses, "change_percent": None}
        row |= {"gap_percent": [gap[0] for gap in gaps], "spread_percent": [gap[1] for gap in gaps]}
        row["worst_sqnr_db"] = [_worst_sqnr(content, name) for content in (left, right)]
        if None not in losses:
            row["change_percent"] = 100 * (losses[1] / losses[0] - 1)
        rows.append(row)
    return rows


def _gap(content: Mapping[str, Any], name: str) -> tuple[float | None, float | None]:
    for gap in content.get("gaps", ()):
        if gap.get("recipe") == name:
            return gap.get("percent"), gap.get("spread_percent")
    return None, None


def _worst_sqnr(content: Mapping[str, Any], name: str) -> float | None:
    numbers = content.get("weights", {}).get(name, {}).values()
    known = [one["sqnr_db"] for one in numbers if one.get("sqnr_db") is not None]
    return min(known) if known else None


def _print_trained(rows: list[dict[str, Any]]) -> None:
    cells = []
    for row in rows:
        losses = [_number(value, ".4f") for value in row["held_out_loss"]]
        gaps = [
            "-" if gap is None else f"{gap:+.2f} ± {spread or 0:.2f} %"
            for gap, spread in zip(row["gap_percent"], row["spread_percent"], strict=True)
        ]
        sqnr = [_number(value, ".1f", " dB") for value in row["worst_sqnr_db"]]
        cells.append((row["recipe"], *losses, _number(row["change_percent"], "+.2f", " %"), *gaps, *sqnr))
    header = ("recipe", "loss, first", "second", "change", "gap, first", "second", "SQNR, first", "second")
    print_table("Held-out loss, its gap to bf16, and the worst SQNR of the trained weights", header, cells)


def _rows(content: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Time]]:
    """What was measured, as text, and its time, of every row of every section; rows that say the same are numbered."""
    seen: Counter[tuple[str, ...]] = Counter()
    for section, rows in content.items():
        if not isinstance(rows, list):
            continue
        for row in _each(rows):
            time = Time.of(row)
            if time is not None:
                said = (_said(name, row[name]) for name in _IDENTITY if row.get(name) not in (None, [], "", False))
                key = (section, *said)
                seen[key] += 1
                yield key if seen[key] == 1 else (*key, f"({seen[key]})"), time


def _each(rows: list[Any]) -> Iterator[Mapping[str, Any]]:
    """The rows, and for one with the times of several tiles a row for each of these."""
    for row in rows:
        if isinstance(row, Mapping):
            tiles = row.get("tiles")
            measured = [tile for tile in tiles if isinstance(tile, Mapping)] if isinstance(tiles, list) else []
            yield from ({**row, "us": tile.get("us"), "tile": tile.get("name")} for tile in measured)
            if not measured:
                yield row


def _said(name: str, value: object) -> str:
    """A field's value, or its name where that says all."""
    return name if value is True else f"{_text(value)} {name}" if name == "devices" else _text(value)


def _text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _timed(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows by what they measure; those of one file alone come last."""
    first, second = dict(_rows(left)), dict(_rows(right))
    rows = []
    for key in [*(key for key in first if key in second), *(key for key in first if key not in second),
                *(key for key in second if key not in first)]:  # fmt: skip
        a, b = first.get(key), second.get(key)
        row: dict[str, Any] = {"what": list(key), "first_us": None, "second_us": None, "ratio": None}
        row["first_us"] = None if a is None else [a.median, a.low, a.high]
        row["second_us"] = None if b is None else [b.median, b.low, b.high]
        row["verdict"] = "in one file alone"
        if a is not None and b is not None:
            row["ratio"] = b.median / a.median if a.median else None
            apart = b.low > a.high or b.high < a.low
            known = a.high > a.low and b.high > b.low
            row["verdict"] = "within the spread" if known else "no spread known"
            if known and apart:
                row["verdict"] = "slower" if b.median > a.median else "faster"
        rows.append(row)
    return rows


def _print_timed(rows: list[dict[str, Any]]) -> None:
    both = [row for row in rows if row["verdict"] != "in one file alone"]
    cells = [
        (" ".join(row["what"][1:]), *(_spread(row[name]) for name in ("first_us", "second_us")),
         _number(row["ratio"], ".3f", "x"), row["verdict"])
        for row in both
    ]  # fmt: skip
    header = ("row", "first", "second", "second / first", "verdict")
    print_table("Times in microseconds: median (lowest to highest)", header, cells)
    kinds = ("faster", "slower", "within the spread", "no spread known")
    counts = {kind: sum(row["verdict"] == kind for row in rows) for kind in kinds}
    told = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    print_line(f"Of {len(both)} rows in both files: {told}; {len(rows) - len(both)} are in one file alone.")


def _spread(times: list[float] | None) -> str:
    return "-" if times is None else f"{times[0]:.4g} ({times[1]:.4g} to {times[2]:.4g})"


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"
