"""`octavo why --kernels` and the optional backend method that it asks: tables, absences, faults."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from typer.testing import CliRunner

from octavo import NoBackendError, OctavoError
from octavo_registry import KernelChoice, Registry, Request
from octavo_registry.cli import app

WHY = ["--recipe", "mxfp8", "--shape", "4,128,32,64", "--framework", "torch", "--device", "cpu", "--kernels"]
TILE = KernelChoice("128x256, cluster 2", 1792, 13.58, 0.9977, 361.2, True)
OTHER = KernelChoice("64x256", 3584, 27.2, 1.0, 402.5, False)


def _backend(fakes: Any, answer: Any) -> Any:
    backend = fakes.Backend()
    backend.asked = []

    def kernels(request: Request, rows: int) -> Any:
        backend.asked.append((request.op, rows))
        if isinstance(answer, BaseException):
            raise answer
        return answer

    backend.kernels = kernels
    return backend


def _why(use: Any, registry: Registry, op: str, *more: str) -> tuple[int, str, str]:
    use(registry)
    result = CliRunner().invoke(app, ["why", op, *WHY, *more])
    return result.exit_code, result.stdout, result.stderr


def test_a_backend_says_what_it_chooses_from(fakes: Any, rng: random.Random) -> None:
    """The bound backend is asked, with the request and the rows; its choices come back as they are."""
    backend = _backend(fakes, [TILE, OTHER])
    registry = fakes.registry(fakes.plugin("a", backend, priority=5), fakes.plugin("b"))
    rows = rng.randrange(1, 1 << 30)
    assert registry.kernel_choices(fakes.request(), rows=rows) == ("a", (TILE, OTHER))
    assert backend.asked == [("fprop", rows)]
    assert registry.kernel_choices(fakes.request(), rows=rows, backend="b") == ("b", None)
    with pytest.raises(NoBackendError):
        registry.kernel_choices(fakes.request(device="tpu"), rows=rows)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (ZeroDivisionError("no rows"), "a cannot say which kernels it has: ZeroDivisionError: no rows"),
        (SystemExit(3), "a cannot say which kernels it has: SystemExit: 3"),
        (7, "a cannot say which kernels it has: TypeError"),
        ([TILE, "64x256"], "a lists a str among its kernels"),
    ],
)
def test_a_broken_model_is_one_sentence(fakes: Any, answer: Any, told: str) -> None:
    """A plugin's fault ends no process and names the backend."""
    registry = fakes.registry(fakes.plugin("a", _backend(fakes, answer)))
    with pytest.raises(OctavoError, match=re.escape(told)):
        registry.kernel_choices(fakes.request(), rows=8)


def test_why_prints_a_table_for_each_gemm(fakes: Any, use: Any) -> None:
    """Rows are M of the shape unless --rows says otherwise; `layer` shows all three GEMMs."""
    backend = _backend(fakes, (TILE, OTHER))
    registry = fakes.registry(fakes.plugin("a", backend))
    code, out, _ = _why(use, registry, "fprop")
    assert code == 0
    assert "fprop by a, 64 rows in equal groups" in out
    assert re.search(r"^  128x256, cluster 2 +1792 +13.58 +99.8% +361.2 +chosen$", out, re.MULTILINE)
    assert re.search(r"^  64x256 +3584 +27.20 +100.0% +402.5$", out, re.MULTILINE)
    code, out, _ = _why(use, registry, "layer", "--rows", "8192")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines() if "8192 rows" in line] == ["fprop", "dgrad", "wgrad"]
    assert backend.asked == [("fprop", 64), ("fprop", 8192), ("dgrad", 8192), ("wgrad", 8192)]
    answer = json.loads(_why(use, registry, "layer", "--inference", "--json")[1])
    (only,) = answer["kernels"]
    assert only["gemm"] == "fprop"
    assert only["choices"][0] == {
        "name": "128x256, cluster 2",
        "tiles": 1792,
        "waves": 13.58,
        "filled": 0.9977,
        "microseconds": 361.2,
        "chosen": True,
    }


def test_why_says_where_there_is_nothing_to_choose(fakes: Any, use: Any) -> None:
    """A backend without a model, one with an empty answer, and no backend: each its sentence."""
    without = fakes.registry(fakes.plugin("a"))
    code, out, _ = _why(use, without, "fprop")
    assert code == 0
    assert "fprop: a names no kernels" in out
    assert json.loads(_why(use, without, "fprop", "--json")[1])["kernels"][0]["choices"] is None
    empty = fakes.registry(fakes.plugin("a", _backend(fakes, ())))
    assert "a has no kernels to choose from" in _why(use, empty, "fprop")[1]
    nobody = fakes.registry(fakes.plugin("a", rows=[fakes.row(device="cuda")]))
    code, out, _ = _why(use, nobody, "fprop")
    assert code == 1
    assert "fprop: nothing serves it" in out


@pytest.mark.parametrize(
    ("op", "more", "told"),
    [
        ("quantize", [], "--kernels: quantize is not a GEMM; ask for one of fprop, dgrad, wgrad, layer"),
        ("fprop", ["--rows", "-1"], "--rows: got -1; 0 or more"),
    ],
)
def test_bad_questions(fakes: Any, use: Any, op: str, more: list[str], told: str) -> None:
    """One line on stderr, exit code 2."""
    code, out, err = _why(use, fakes.registry(fakes.plugin("a")), op, *more)
    assert (code, out) == (2, "")
    assert told in err


def test_rows_without_kernels_is_bad_input(fakes: Any, use: Any) -> None:
    """An option that would change nothing is refused."""
    use(fakes.registry(fakes.plugin("a")))
    result = CliRunner().invoke(app, ["why", "fprop", *WHY[:-1], "--rows", "8"])
    assert result.exit_code == 2
    assert "--rows is for --kernels" in result.stderr
