"""Headers of CUDA kernels define each type once: their files all share one namespace."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

LIBRARY = Path(__file__).parents[2] / "lib" / "cuda"
TYPE = re.compile(r"^(?:struct|class|enum class)\s+(?:alignas\(\d+\)\s+)?(\w+)[^;{\n]*\{", re.MULTILINE)


def test_no_name_has_two_types() -> None:
    """Two definitions of one name in a program are undefined behaviour, even in files that never meet."""
    places = defaultdict(set)
    for path in [*LIBRARY.rglob("*.h"), *LIBRARY.rglob("*.cuh")]:
        for name in TYPE.findall(path.read_text()):
            places[name].add(str(path.relative_to(LIBRARY)))
    assert {"GemmParams", "Tile", "StepArgs"} <= set(places)
    assert not {name: files for name, files in places.items() if len(files) > 1}
