"""What the built library asks of the system and shows to it: its ELF sections, read without tools."""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo_native import _native

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads ELF files, which this platform has not")

_DYNAMIC, _DYNSYM = 6, 11  # section types of the System V ABI, chapter 4
_NEEDED = 1


class _Sections:
    def __init__(self, path: Path) -> None:
        self.data = path.read_bytes()
        if self.data[:6] != b"\x7fELF\x02\x01":
            raise ValueError(f"{path} is no little-endian ELF64 file")
        (offset,) = struct.unpack_from("<Q", self.data, 0x28)
        size, count = struct.unpack_from("<HH", self.data, 0x3A)
        self.headers = [struct.unpack_from("<IIQQQQIIQQ", self.data, offset + i * size) for i in range(count)]

    def rows(self, kind: int, layout: str) -> Iterator[tuple[tuple[int, ...], bytes]]:
        """Entries of the section of this type, each with the string table that it refers to."""
        (header,) = [header for header in self.headers if header[1] == kind]
        start, size, link = header[4], header[5], header[6]
        strings = self.headers[link]
        table = self.data[strings[4] : strings[4] + strings[5]]
        for row in struct.iter_unpack(layout, self.data[start : start + size]):
            yield row, table


def _string(table: bytes, offset: int) -> str:
    return table[offset : table.index(b"\0", offset)].decode()


def needed_libraries(path: Path) -> set[str]:
    """Names of the shared libraries that the loader must find."""
    rows = _Sections(path).rows(_DYNAMIC, "<qQ")
    return {_string(table, value) for (tag, value), table in rows if tag == _NEEDED}


def visible_symbols(path: Path) -> set[str]:
    """Names that other objects can link to: defined, and not local."""
    found = set()
    for (name, info, _, section, _, _), table in _Sections(path).rows(_DYNSYM, "<IBBHQQ"):
        if section and info >> 4:
            found.add(_string(table, name))
    return found


def test_the_shared_object_needs_no_library_of_others() -> None:
    """One artifact for every framework and driver: CUDA's runtime is inside, libtorch, jaxlib and libpython are not."""
    allowed = {
        "libstdc++.so.6",
        "libgcc_s.so.1",
        "libc.so.6",
        "libm.so.6",
        "libpthread.so.0",
        "libdl.so.2",
        "librt.so.1",
    }
    needed = {name for name in needed_libraries(Path(_native.__file__)) if not name.startswith("ld-linux")}
    assert needed <= allowed


def test_the_shared_object_shows_its_entry_alone() -> None:
    """The CUDA runtime inside must not be found by, or find, the one that a framework brings."""
    assert visible_symbols(Path(_native.__file__)) == {"PyInit__native"}


def test_the_stable_abi_is_the_only_one_used() -> None:
    """One artifact for Python 3.11 and newer: its file says abi3."""
    assert Path(_native.__file__).name == "_native.abi3.so"
