"""The gate on ptxas's output: what it must refuse, and the names that it prints."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "ptxas_report.py"

CLEAN = """\
-- The CUDA compiler identification is NVIDIA 13.0.88 with host compiler GNU 12.2.0
[1/3] Building CXX object CMakeFiles/kernels.dir/lib/cpu/rows/plan.cpp.o
[2/3] Building CUDA object CMakeFiles/kernels.dir/lib/cuda/rows/plan.cu.o
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN6octavo4planILNS_6FormatE2ELb1EEEvPKl' for 'sm_90a'
ptxas info    : Function properties for _ZN6octavo4planILNS_6FormatE2ELb1EEEvPKl
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 1024 bytes smem, 400 bytes cmem[0]
ptxas info    : Compile time = 13.074 ms
"""

needs_demangler = pytest.mark.skipif(
    not (shutil.which("cu++filt") or shutil.which("c++filt")), reason="neither cu++filt nor c++filt is installed"
)


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ptxas_report", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_a_clean_log_has_its_kernels_and_no_fault(tool: ModuleType) -> None:
    log = tool.read(CLEAN)
    assert log.nvcc == "13.0.88"
    assert log.faults == ()
    (kernel,) = log.kernels
    assert (kernel.file, kernel.registers, kernel.shared) == ("lib/cuda/rows/plan.cu", 40, 1024)


@pytest.mark.parametrize(
    ("found", "instead"),
    [
        ("0 bytes stack frame", "8 bytes stack frame"),
        ("0 bytes spill stores", "4 bytes spill stores"),
        ("0 bytes spill loads", "4 bytes spill loads"),
        (
            "ptxas info    : Compile time",
            "ptxas info    : (C7514) Potential Performance Loss: wgmma.mma_async instructions are serialized\nx",
        ),
    ],
)
def test_what_slows_a_kernel_down_is_a_fault(tool: ModuleType, found: str, instead: str, tmp_path: Path) -> None:
    """hopper-kernels.md, "Traps": no C75xx line and no spill in a build log."""
    text = CLEAN.replace(found, instead, 1)
    assert text != CLEAN
    (fault,) = tool.read(text).faults
    assert fault.startswith("lib/cuda/rows/plan.cu: ")


def test_of_a_file_that_was_compiled_twice_the_last_counts(tool: ModuleType) -> None:
    """Incremental builds print only what they compile; their logs are read one after the other."""
    spilled = CLEAN.replace("0 bytes spill stores", "4 bytes spill stores").replace("Used 40", "Used 99")
    assert tool.read(spilled + CLEAN) == tool.read(CLEAN)
    assert tool.read(CLEAN + spilled) == tool.read(spilled)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("-- Configuring done\n", "holds no kernel"),
        (CLEAN.partition("ptxas info    : Used")[0], "cut off"),
    ],
)
def test_a_log_without_kernels_or_an_end_passes_nothing(
    tool: ModuleType, text: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A build that ptxas never saw would pass every check."""
    log = tmp_path / "build.log"
    log.write_text(text)
    assert tool.main([str(log), "--table", str(tmp_path / "kernels.md")]) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["true", "(bool)1"])
def test_two_demanglers_name_a_kernel_alike(tool: ModuleType, flag: str) -> None:
    """The table is compared on machines with cu++filt and with c++filt alone, which write booleans differently."""
    name = f"void octavo::plan<(octavo::Format)2, {flag}, (bool)0>(octavo::PlanArgs)"
    assert tool.readable(name, {"Format": {2: "e2m1"}}) == "plan<e2m1, true, false>"


@needs_demangler
def test_the_table_is_written_and_compared(tool: ModuleType, tmp_path: Path) -> None:
    """--check: equal passes, another register count fails, a page of another compiler is not compared."""
    log, page = tmp_path / "build.log", tmp_path / "kernels.md"
    log.write_text(CLEAN)
    arguments = [str(log), "--table", str(page)]
    assert tool.main([*arguments, "--check"]) == 1  # there is no page yet
    assert tool.main(arguments) == 0
    assert "## lib/cuda/rows/plan.cu" in page.read_text()
    assert "| `plan<e2m1, true>` | 40 | 1024 |" in page.read_text()
    assert tool.main([*arguments, "--check"]) == 0
    log.write_text(CLEAN.replace("Used 40", "Used 41"))
    assert tool.main([*arguments, "--check"]) == 1
    log.write_text(CLEAN.replace("Used 40", "Used 41").replace("13.0.88", "13.1.5"))
    assert tool.main([*arguments, "--check"]) == 0
    log.write_text(CLEAN.replace("0 bytes spill stores", "4 bytes spill stores").replace("13.0.88", "13.1.5"))
    assert tool.main([*arguments, "--check"]) == 1


@needs_demangler
def test_a_page_speaks_of_its_sources_alone(tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`nox` does not optimize kernels that ptxas has judged; with one byte of a source changed it has judged none."""
    sources, page, log = tmp_path / "native", tmp_path / "kernels.md", tmp_path / "build.log"
    for pattern in tool.SOURCES:
        path = sources / pattern.replace("**/", "").replace("[ch]*", "cuh").replace("*", "one")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("// before\n")
    (sources / "lib" / "cpu").mkdir()
    monkeypatch.setattr(tool.digest_of_sources, "__defaults__", (sources,))
    log.write_text(CLEAN)
    assert not tool.is_of_these_sources("13.0.88", page)  # there is none yet
    assert tool.main([str(log), "--table", str(page)]) == 0
    assert tool.is_of_these_sources("13.0.88", page)
    assert not tool.is_of_these_sources("13.1.5", page)
    (sources / "lib" / "cpu" / "other.cpp").write_text("// no kernel\n")
    assert tool.is_of_these_sources("13.0.88", page)
    changed = [path for path in sources.rglob("*") if path.is_file() and path.name != "other.cpp"]
    assert len(changed) == len(tool.SOURCES)
    for path in changed:
        path.write_text("// after\n")
        assert not tool.is_of_these_sources("13.0.88", page), path
        assert tool.main([str(log), "--table", str(page), "--check"]) == 1, path
        path.write_text("// before\n")
    path.rename(path.with_name("renamed.cuh"))
    assert not tool.is_of_these_sources("13.0.88", page)


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("void octavo::(anonymous namespace)::cast<(octavo::DType)2, 4, false>(octavo::Args)", "cast<bf16, 4, false>"),
        ("octavo::_GLOBAL__N__1f2e_7_plan_cu_aa::make(long const*)", "make"),
        ("void octavo::rows<octavo::Policy<(octavo::Other)3> >(void (*)(int))", "rows<Policy<Other 3> >"),
        ("void octavo::cuda::f<(octavo::cuda::Kind)2, (octavo::cuda::Promotion)3>(int)", "cuda::f<block, vectors>"),
    ],
)
def test_names_are_those_of_the_source(tool: ModuleType, name: str, short: str) -> None:
    """A row is found by searching the sources for what it says."""
    enums = tool.enum_names([path.read_text() for path in tool.TYPES])
    assert tool.readable(name, enums) == short
