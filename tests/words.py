"""The words of the house: stiff constructions that the sources and the docs have left behind.

`python tests/words.py [PACKAGE ...]` lists every offender by package; `tests/test_words.py` fails where there is one.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from source_tree import nodes
from workspace import ROOT, packages, tracked

SOURCES = ("**/*.py", "**/*.pyi", "**/*.cpp", "**/*.h", "**/*.cu", "**/*.cuh", "**/*.md")
# what a release has said, or what was generated, stays as it is
EXCEPT = re.compile(r"(^|/)(changes/|CHANGELOG|tests/|benchmarks/results/|conftest\.py)")

UNITS = (
    "group|token|row|byte|expert|rank|step|layer|call|tile|thread|microbatch|K-block|word|block|weight|operand|GEMM|"
    "kind|scaling|choice|element|process|sentence|operation|GPU|device|column|package|benchmark|launch|panel|matrix"
)
COUNTED = r"(?:once|twice|one|two|three|four|eight|\d+)"
THINGS = (
    "(?:scale|size|amax|byte|bit|word|line|row|code|flag|parameter|matrix|tensor|plan|register|verdict|integer|recipe|"
    "quantizer|gather|draw|file)s?"
)
VERBS = "is|has|had|was|got|gets|holds|sends|of|that|which|in|reads|does|may|can"
PER = re.compile(rf"\b(?:{COUNTED}(?: {THINGS})?|{THINGS}) an? (?:{UNITS})\b(?! (?:{VERBS})\b)")
"""'one scale a row', 'once a step': say 'one scale per row', 'once per step'."""
NEGATED = re.compile(r"(?<![Tt]here )\b(?:is|are) no (?!(?:\w+er|more|less)\b)(?=[A-Za-z]|$)")
"""'x is no Tensor' in a message: say 'x is not a Tensor'."""
ROUND = re.compile(r"\bthe other way round\b")
"""Say 'vice versa', or what the other way is."""

C_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"')


@cache
def offenders() -> dict[str, dict[str, list[str]]]:
    """Rule -> package, or "docs" -> places with the words that are meant."""
    found: dict[str, dict[str, list[str]]] = {
        "'one scale a row' is 'one scale per row'": {},
        "'x is no tensor' is 'x is not a tensor', in messages": {},
        "'the other way round' is 'vice versa'": {},
    }
    per, negated, reversed_ = found.values()
    for file in tracked(*SOURCES):
        place = file.relative_to(ROOT).as_posix()
        if EXCEPT.search(place):
            continue
        owner = _owner(file)
        text = file.read_text()
        for rule, pattern in ((per, PER), (reversed_, ROUND)):
            for number, words in _matches(pattern, text):
                rule.setdefault(owner, []).append(f"{place}:{number} {words}")
        for number, message in _messages(file, text):
            for _, words in _matches(NEGATED, message):
                negated.setdefault(owner, []).append(f"{place}:{number} {words}")
    return found


def _owner(file: Path) -> str:
    for name, package in packages().items():
        if package.directory in file.parents:
            return name
    return "docs" if file.suffix == ".md" or "docs" in file.relative_to(ROOT).parts else "tools"


def _matches(pattern: re.Pattern[str], text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), start=1):
        for match in pattern.finditer(line):
            yield number, f"...{line[max(0, match.start() - 20) : match.end() + 20].strip()}..."


def _messages(file: Path, text: str) -> Iterator[tuple[int, str]]:
    """Line and text of every literal that an error shows: those in a `raise`, and every string of C++."""
    if file.suffix in (".py", ".pyi"):
        for node in nodes(file):
            if isinstance(node, ast.Raise):
                for part in ast.walk(node):
                    if isinstance(part, ast.Constant) and isinstance(part.value, str):
                        yield part.lineno, part.value
    elif file.suffix != ".md":
        for number, line in enumerate(text.splitlines(), start=1):
            for match in C_STRING.finditer(line):
                yield number, match[0]


def main(names: list[str]) -> int:
    """Print the offenders of the packages that are named, or of all."""
    count = 0
    for rule, by_owner in offenders().items():
        print(rule)
        for owner in sorted(by_owner):
            if not names or owner in names:
                count += len(by_owner[owner])
                print(f"  {owner}: {len(by_owner[owner])}")
                print("".join(f"    {line}\n" for line in by_owner[owner]), end="")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
