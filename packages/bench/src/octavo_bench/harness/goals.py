"""Goals: what a measured row is held to, and the file that they are written in.

A benchmark gives each row named measures: its rate over a peer's, its milliseconds. A goals file says which measures of
which rows have to reach what. Nothing in this package knows a figure of any machine.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from octavo_bench.errors import InputError


@dataclass(frozen=True, slots=True)
class Goal:
    """One goal. `most`: `reached` may not be above `needed` (a time); else not below it (a rate, a ratio)."""

    name: str
    needed: float
    reached: float
    most: bool = False

    @property
    def margin(self) -> float:
        """1 or more where it is met."""
        return self.needed / self.reached if self.most else self.reached / self.needed

    @property
    def passed(self) -> bool:
        """Whether it is met."""
        return self.margin >= 1

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "name": self.name,
            "needed": round(self.needed, 4),
            "reached": round(self.reached, 4),
            "margin": round(self.margin, 4),
            "passed": self.passed,
        }


def tightest(goals: Iterable[Goal]) -> Goal | None:
    """The goal with the smallest margin."""
    return min(goals, key=lambda goal: goal.margin, default=None)


def verdict(goals: Iterable[Goal]) -> str:
    """A table's cell: margin of the tightest goal and its name, or "-"."""
    goal = tightest(goals)
    return "-" if goal is None else f"{goal.margin:.3f} {'pass' if goal.passed else 'MISS'} ({goal.name})"


class _Part(BaseModel):
    # of NaN nothing is above or below: a goal that nobody misses, or nobody reaches
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Range(_Part):
    """Numbers from `least` to `most`, both included; None: without an end."""

    least: float | None = None
    most: float | None = None

    def __contains__(self, value: object) -> bool:
        if not isinstance(value, int | float):
            return False
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)


Condition = Range | list[str | bool | int]


@dataclass(frozen=True, slots=True)
class Place:
    """Where rows were measured: "cuda" or "cpu", and the GPU's name."""

    device: str
    gpu: str = ""


class Rule(_Part):
    """What one measure has to reach in the rows that fit.

    measure          its name; rows without it have no such goal
    at_least, at_most  one of them: a number, or the name of figures by shape; shapes without a figure have no goal
    less             figures that are taken off first
    times            a factor on what is needed
    name             the goal's name, in which {needed} and {measure} are filled in
    where            by field of the row: the values that it may have
    unless           rows that fit all of these are left out
    devices          of the rows that are judged
    gpu              part of the GPU's name, for figures of one machine
    alternative      of all goals of a row with the same one, the easiest counts
    """

    measure: str
    at_least: float | str | None = None
    at_most: float | str | None = None
    less: str | None = None
    times: float = 1.0
    name: str = "{needed:g} of {measure}"
    where: dict[str, Condition] = {}
    unless: dict[str, Condition] = {}
    devices: list[str] = ["cuda"]
    gpu: str = ""
    alternative: str = ""

    @model_validator(mode="after")
    def _one_way(self) -> Rule:
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError("give either at_least or at_most")
        try:
            self.named(0.0)
        except (KeyError, IndexError, ValueError, AttributeError, TypeError):
            raise ValueError(
                f"name is {self.name!r}; it may hold {{needed}} and {{measure}}, such as {{needed:g}}"
            ) from None
        return self

    def named(self, needed: float) -> str:
        """The goal's name."""
        return self.name.format(needed=needed, measure=self.measure)

    @property
    def bar(self) -> float | str:
        """What is needed, or the name of the figures."""
        bar = self.at_most if self.at_least is None else self.at_least
        assert bar is not None  # validated
        return bar

    def is_for(self, place: Place) -> bool:
        """Whether rows that were measured there are held to it."""
        return place.device in self.devices and self.gpu in place.gpu

    def fits(self, row: Mapping[str, Any]) -> bool:
        """Whether a row with these fields is held to it."""
        return _fits(self.where, row) and not (self.unless and _fits(self.unless, row))


def _fits(conditions: Mapping[str, Condition], row: Mapping[str, Any]) -> bool:
    return all(row.get(name) in allowed for name, allowed in conditions.items())


class Recorded(_Part):
    """Figures of other libraries, quoted beside the rows of one benchmark: by shape, then by name."""

    title: str
    unit: str
    figures: dict[str, dict[str, float]]


class Goals(_Part):
    """A goals file.

    label     said of recorded figures
    figures   numbers by shape, under the names by which rules refer to them
    goals     rules by benchmark
    recorded  figures of other libraries by benchmark
    """

    label: str = ""
    figures: dict[str, dict[str, float]] = {}
    goals: dict[str, list[Rule]] = {}
    recorded: dict[str, Recorded] = {}

    @model_validator(mode="after")
    def _figures_exist(self) -> Goals:
        for rule in (rule for rules in self.goals.values() for rule in rules):
            for name in (rule.bar, rule.less):
                if isinstance(name, str) and name not in self.figures:
                    raise ValueError(
                        f"a rule names the figures {name!r}; there are {', '.join(self.figures) or 'none'}"
                    )
        return self

    def judge(
        self, benchmark: str, row: Mapping[str, Any], measures: Mapping[str, float], place: Place
    ) -> tuple[Goal, ...]:
        """The goals of one row.

        row       its fields as in the result file, the shape as "G,K,N,M"
        measures  what was reached, by name
        """
        goals: dict[str, Goal] = {}
        for index, rule in enumerate(self.goals.get(benchmark, [])):
            needed = self._needed(rule, str(row.get("shape")))
            reached = measures.get(rule.measure)
            if not rule.is_for(place) or needed is None or reached is None or not rule.fits(row):
                continue
            goal = Goal(rule.named(needed), needed, reached, most=rule.at_most is not None)
            key = rule.alternative or str(index)
            if key not in goals or goals[key].margin < goal.margin:
                goals[key] = goal
        return tuple(goals.values())

    def unread(self, benchmark: str, measures: Iterable[str], place: Place) -> list[str]:
        """Sentences about goals of which no row can have one: they may be misspelled.

        measures  that the rows of a run have
        """
        rules, known = self.goals.get(benchmark), list(dict.fromkeys(measures))
        if rules is None:
            of = ", ".join(self.goals) or "no benchmark"
            return [f"--goals has no goals of {benchmark}; it has those of {of}"]
        here = [rule for rule in rules if rule.is_for(place)]
        missing = dict.fromkeys(rule.measure for rule in here if rule.measure not in known)
        there = ", ".join(map(repr, known)) or "none"
        return [f"--goals: no row has the measure {name!r}; measures of these rows: {there}" for name in missing]

    def _needed(self, rule: Rule, shape: str) -> float | None:
        needed = rule.bar if isinstance(rule.bar, float | int) else self.figures[rule.bar].get(shape)
        if needed is None:
            return None
        return (needed - (0.0 if rule.less is None else self.figures[rule.less].get(shape, 0.0))) * rule.times


def read_goals(path: Path | None) -> Goals | None:
    """The goals of a file; None for None, `InputError` where it cannot be read or does not fit."""
    if path is None:
        return None
    try:
        return Goals.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise InputError(f"--goals {path}: {error.strerror}; give a goals file, such as the repository's") from error
    except UnicodeDecodeError as error:
        raise InputError(f"--goals {path} is not UTF-8 text; give a TOML file") from error
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"--goals {path} is not a TOML file: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise InputError(f"--goals {path}: {place}: {first['msg']}") from error
