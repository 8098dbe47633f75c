"""Gate on what ptxas says of the CUDA kernels, and the table of their registers in native/tools/kernels.md.

    python native/tools/ptxas_report.py build.log            write the table
    python native/tools/ptxas_report.py build.log --check    compare it with the committed one

The log is what the build printed (ninja, nvcc -Xptxas -v). Exits with 1 where ptxas spilled registers, used a stack
frame or serialised wgmma (C75xx), and with --check where the table is not that of the log. Register counts belong to
one compiler: a log of another nvcc is gated and its table is not compared. The page also names the sources, so that
`is_of_these_sources` knows whether what it says of them still holds.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

NATIVE = Path(__file__).resolve().parent.parent
TABLE = NATIVE / "tools" / "kernels.md"
SOURCES = (
    "cmake/Cuda.cmake",
    "include/**/*.h",
    "lib/common/**/*.h",
    "lib/cuda/**/*.cu",
    "lib/cuda/**/*.cuh",
    "lib/cuda/**/*.h",
)
"""What ptxas compiles, as patterns in native/."""
TYPES = (*(NATIVE / "include" / "octavo").glob("*.h"), *(NATIVE / "lib" / "cuda").glob("*/*.cuh"))

_NVCC = re.compile(r"CUDA compiler identification is NVIDIA (\S+)")
_FILE = re.compile(r"Building CUDA object \S*?/(lib/\S+\.cu)\.o")
_ENTRY = re.compile(r"Compiling entry function '(\w+)' for")
_PROPERTIES = re.compile(r"Function properties for (\S+)")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_SERIALISED = re.compile(r"\(C75\d\d\)|\bC75\d\d\b")


@dataclass(frozen=True, order=True)
class Kernel:
    """One compiled kernel: its source file, mangled name, registers per thread, static shared memory in bytes."""

    file: str
    symbol: str
    registers: int
    shared: int


@dataclass(frozen=True)
class Log:
    """What a build log says: the compiler, the kernels, and a sentence for each thing that the gate forbids."""

    nvcc: str
    kernels: tuple[Kernel, ...]
    faults: tuple[str, ...]


def read(text: str) -> Log:
    """The log's kernels and faults; ValueError where it holds no kernel or is cut off.

    Logs of incremental builds may follow each other in one text: the last compilation of a file counts.
    """
    nvcc, file, entry, function = "unknown", "", "", ""
    kernels: list[Kernel] = []
    faults: list[str] = []
    found = {file: (kernels, faults)}
    for line in text.splitlines():
        if match := _NVCC.search(line):
            nvcc = match[1]
        elif match := _FILE.search(line):
            file, entry = match[1], ""
            kernels, faults = found[file] = [], []
        elif match := _ENTRY.search(line):
            entry = match[1]
        elif match := _PROPERTIES.search(line):
            function = match[1]
        elif match := _FRAME.search(line):
            stack, stores, loads = map(int, match.groups())
            if stack or stores or loads:
                faults.append(
                    f"{file}: {function} has a stack frame of {stack} bytes, {stores} of spill stores and "
                    f"{loads} of spill loads; none is allowed"
                )
        elif _SERIALISED.search(line):
            faults.append(f"{file}: {line.strip()}")
        elif entry and (match := _USED.search(line)):
            shared = _SHARED.search(line)
            kernels.append(Kernel(file, entry, int(match[1]), int(shared[1]) if shared else 0))
            entry = ""
    if entry:
        raise ValueError(f"the log ends inside {entry}: it is cut off, or ptxas failed; build again")
    compiled = tuple(sorted(kernel for kernels, _ in found.values() for kernel in kernels))
    if not compiled:
        raise ValueError("the log holds no kernel: build with nvcc on the PATH (OCTAVO_CUDA=ON) and keep all output")
    return Log(nvcc, compiled, tuple(fault for _, faults in found.values() for fault in faults))


def demangled(symbols: Sequence[str]) -> list[str]:
    """These lines with the C++ names of the symbols in them, by cu++filt or c++filt."""
    tool = shutil.which("cu++filt") or shutil.which("c++filt")
    if tool is None:
        raise ValueError("neither cu++filt (CUDA toolkit) nor c++filt (binutils) is on the PATH; install one")
    run = subprocess.run([tool], input="\n".join(symbols), capture_output=True, text=True, check=True)
    return run.stdout.splitlines()


def enum_names(headers: Sequence[str]) -> dict[str, dict[int, str]]:
    """Names of the numbers of each `enum class` of these headers."""
    found: dict[str, dict[int, str]] = {}
    for text in headers:
        for name, body in re.findall(r"enum class (\w+)\s*(?::\s*\w+\s*)?{([^}]*)}", text):
            members: dict[int, str] = {}
            for member, number in re.findall(r"(\w+)\s*(?:=\s*(\d+))?\s*(?:,|$)", re.sub(r"//.*", "", body).strip()):
                members[int(number) if number else max(members, default=-1) + 1] = member
            found[name] = members
    return found


def readable(name: str, enums: dict[str, dict[int, str]]) -> str:
    """A demangled name without namespaces, result and parameters; template arguments by name."""
    name = re.sub(r"(?:\w*_GLOBAL__N_\w*|\(anonymous namespace\)|octavo)::", "", name)

    def member(match: re.Match[str]) -> str:
        if match[1] == "bool":  # c++filt writes true where cu++filt writes (bool)1
            return "true" if int(match[2]) else "false"
        return enums.get(match[1], {}).get(int(match[2]), f"{match[1]} {match[2]}")

    name = re.sub(r"\((?:\w+::)*(\w+)\)(\d+)", member, name)
    depth = 0
    for position, letter in enumerate(name):  # the parameters begin at the first ( outside of < >
        depth += {"<": 1, ">": -1}.get(letter, 0)
        if letter == "(" and not depth:
            name = name[:position]
            break
    return name.removeprefix("void ").strip()


def digest_of_sources(native: Path = NATIVE) -> str:
    """Of the paths and contents of the kernels' sources: sixteen hexadecimal digits."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in SOURCES for path in native.glob(pattern)}):
        digest.update(f"{path.relative_to(native).as_posix()}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def table(log: Log) -> str:
    """The page: one table per source file, one row per kernel."""
    enums = enum_names([path.read_text() for path in TYPES])
    names = [readable(name, enums) for name in demangled([kernel.symbol for kernel in log.kernels])]
    rows = sorted(zip((k.file for k in log.kernels), names, log.kernels, strict=True))
    page = [
        "# CUDA kernels",
        "",
        f"Registers per thread and static shared memory, as nvcc {log.nvcc} compiles them for sm_90a. No kernel spills",
        "registers or has a stack frame: a session of nox fails where one does, and where this file differs",
        "from what the compiler prints. Written by `python native/tools/ptxas_report.py build.log`, of the sources",
        f"with the digest {digest_of_sources()}: while they are these, `nox` compiles them without optimization, and",
        "`nox -s kernels` as they are shipped.",
        "",
        "In GEMM kernels the producer warpgroup gives registers to the consumers at run time (setmaxnreg: 56 and 224",
        "per thread, 72 and 216 where rows of tokens are gathered), and their shared memory, up to 227 KB, is dynamic:",
        "neither is in the table.",
    ]
    file = ""
    for source, name, kernel in rows:
        if source != file:
            page += ["", f"## {source}", "", "| kernel | registers | shared memory, bytes |", "|---|---|---|"]
            file = source
        page.append(f"| `{name}` | {kernel.registers} | {kernel.shared} |")
    return "\n".join(page) + "\n"


def compiler_of(page: str) -> str:
    """The nvcc that a written page names; "" where it names none."""
    match = re.search(r"as nvcc (\S+) compiles", page)
    return match[1] if match else ""


def is_of_these_sources(nvcc: str, page: Path = TABLE) -> bool:
    """Whether the written page speaks of the sources as they are and of this version of nvcc."""
    text = page.read_text() if page.exists() else ""
    return compiler_of(text) == nvcc and f"with the digest {digest_of_sources()}:" in text


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 fine, 1 a fault or another table, 2 a log that cannot be read."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("log", type=Path, help="what the build printed")
    parser.add_argument("--check", action="store_true", help="compare the table instead of writing it")
    parser.add_argument("--table", type=Path, default=TABLE, help="the page (default: %(default)s)")
    options = parser.parse_args(arguments)
    try:
        log = read(options.log.read_text(errors="replace"))
        page = table(log)
    except (OSError, ValueError) as error:
        print(f"{options.log}: {error}", file=sys.stderr)
        return 2
    for fault in demangled(log.faults):
        print(fault, file=sys.stderr)
    committed = options.table.read_text() if options.table.exists() else ""
    if not options.check:
        options.table.write_text(page)
    elif committed and compiler_of(committed) != log.nvcc:
        print(f"{options.table} is of nvcc {compiler_of(committed)} and the log of nvcc {log.nvcc}: not compared")
    elif committed != page:
        print(f"{options.table} is not what the log says; run this without --check and commit it", file=sys.stderr)
        return 1
    most = max(log.kernels, key=lambda kernel: kernel.registers)
    print(f"{len(log.kernels)} kernels, at most {most.registers} registers, {len(log.faults)} faults")
    return 1 if log.faults else 0


if __name__ == "__main__":
    sys.exit(main())
