"""Source: the tensors of a folder of safetensors files, by name.

Reading executes nothing of the files, and no name in an index opens a file outside of the folder.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol, TypeVar

from torch import Tensor

from octavo.errors import printable, shown
from octavo_torch.checkpoint.formats.package import check_safetensors

_Result = TypeVar("_Result")

VERSION = 1
KEY = "octavo_experts"
"""Key of the metadata entry in a file that export_experts wrote."""
INDEX = "model.safetensors.index.json"
_MOST_BYTES = 1 << 28
"""Largest size of a JSON file that is read; an index of 100 000 tensors has ten million bytes."""


class _Slice(Protocol):
    def get_shape(self) -> list[int]: ...
    def __getitem__(self, index: int) -> Tensor: ...


class _File(Protocol):
    """What is used of safetensors' safe_open, which has no types."""

    def keys(self) -> list[str]: ...
    def metadata(self) -> dict[str, str] | None: ...
    def get_tensor(self, name: str) -> Tensor: ...
    def get_slice(self, name: str) -> _Slice: ...


class Source:
    """The tensors of one safetensors file, or of a folder with an index or with one such file.

    names    of all tensors, sorted
    config   what the folder says about quantization: config.json's quantization_config or hf_quant_config.json's
             quantization; None where it says nothing
    """

    def __init__(self, path: Path) -> None:
        """Raises ValueError for a path with nothing to read, and for an index that fits no folder."""
        self.path = path
        self._open: dict[Path, _File] = {}
        self._files: dict[str, Path] = {}
        folder = path if path.is_dir() else path.parent
        if not path.is_dir():
            self._files = dict.fromkeys(self._names_in(path), path)
        elif (folder / INDEX).is_file():
            self._files = _index(folder)
        else:
            found = sorted(folder.glob("*.safetensors"))
            if len(found) != 1:
                raise ValueError(
                    f"path is the folder {printable(folder)}, which has no {INDEX} and {len(found)} files that end in "
                    ".safetensors; give a folder with an index, or one such file"
                )
            self._files = dict.fromkeys(self._names_in(found[0]), found[0])
        self.names = sorted(self._files)
        self.config = _quantization(folder)

    def under(self, path: str) -> list[str]:
        """What follows `path` and a dot in the names that begin with these."""
        start = f"{path}."
        first = bisect.bisect_left(self.names, start)
        last = bisect.bisect_left(self.names, f"{path}/")  # the character behind the dot
        return [name[len(start) :] for name in self.names[first:last]]

    def open_files_of(self, names: Iterable[str]) -> None:
        """Open every file that has one of these tensors; ValueError for a file that is missing or damaged, or that
        lacks a tensor which the index says it has."""
        listed: dict[Path, set[str]] = {}
        for name, file in self._files.items():
            listed.setdefault(file, set()).add(name)
        for file in sorted({self._files[name] for name in names}):
            absent = sorted(listed[file] - self._names_in(file))
            if absent:
                raise ValueError(
                    f"{printable(file)} lacks {shown(absent[0])}, which {INDEX} says it has; copy the folder again"
                )

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, which is not read."""
        return self._read(name, lambda file: tuple(file.get_slice(name).get_shape()))

    def tensor(self, name: str) -> Tensor:
        """The tensor, in host memory."""
        return self._read(name, lambda file: file.get_tensor(name))

    def slice(self, name: str, index: int) -> Tensor:
        """Element `index` of the tensor's first axis."""
        return self._read(name, lambda file: file.get_slice(name)[index])

    def _read(self, name: str, how: Callable[[_File], _Result]) -> _Result:
        from safetensors import SafetensorError

        file = self._of(name)
        try:
            return how(file)
        except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"{shown(name)} in {printable(self._files[name])} cannot be read: {printable(error)}; copy the file "
                "again"
            ) from None

    def _of(self, name: str) -> _File:
        file = self._files[name]
        if file not in self._open:
            self._names_in(file)
        return self._open[file]

    def _names_in(self, file: Path) -> set[str]:
        check_safetensors()
        from safetensors import SafetensorError, safe_open

        if file not in self._open:
            try:
                opened: _File = safe_open(str(file), framework="pt")
            except (SafetensorError, OSError) as error:
                raise ValueError(
                    f"{printable(file)} is not a complete safetensors file: {printable(error)}; copy the folder again, "
                    "or give another path"
                ) from None
            _check_metadata(file, opened.metadata() or {})
            self._open[file] = opened
        return set(self._open[file].keys())


def _index(folder: Path) -> dict[str, Path]:
    """The file of each tensor; ValueError for a file that is not an index, or names files outside of the folder."""
    weights = _json(folder / INDEX).get("weight_map")
    if not isinstance(weights, Mapping) or not weights:
        raise ValueError(f"{printable(folder / INDEX)} has no weight_map; give a folder with an index of tensors")
    files: dict[str, Path] = {}
    for tensor, name in weights.items():
        if not isinstance(name, str) or not name.endswith(".safetensors") or {*name} & {"/", "\\", ":", "\0"}:
            raise ValueError(
                f"{printable(folder / INDEX)} has {shown(tensor)} in {shown(name)}, which names no safetensors file in "
                "its folder; give an index of files beside it"
            )
        files[tensor] = folder / name
    missing = sorted({file for file in files.values() if not file.is_file()})
    if missing:
        raise ValueError(f"{printable(missing[0])} is missing, which {INDEX} has tensors in; copy the folder again")
    return files


def _quantization(folder: Path) -> Mapping[str, object] | None:
    for file, key in (("hf_quant_config.json", "quantization"), ("config.json", "quantization_config")):
        if (folder / file).is_file():
            said = _json(folder / file).get(key)
            if said is not None and not isinstance(said, Mapping):
                raise ValueError(
                    f"{printable(folder / file)} has {key} {shown(said)}, which is not an object; give a model's file"
                )
            if said is not None:
                return said
    return None


def _json(file: Path) -> dict[str, object]:
    """The object in a JSON file. ValueError for anything else, and for a name that stands twice."""
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise ValueError(f"it is larger than {_MOST_BYTES} bytes")
        content = json.loads(file.read_bytes(), object_pairs_hook=_once)
    except (OSError, RecursionError, ValueError) as error:
        raise ValueError(
            f"{printable(file)} cannot be read as JSON: {printable(error)}; give a model's own file"
        ) from None
    if not isinstance(content, dict):
        raise ValueError(f"{printable(file)} is not a JSON object; give a model's own file")
    return content


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    content: dict[str, object] = {}
    for name, value in pairs:
        if name in content:
            raise ValueError(f"{shown(name)} stands twice in one object")
        content[name] = value
    return content


def _check_metadata(file: Path, metadata: Mapping[str, str]) -> None:
    """ValueError for a file of a later octavo-torch."""
    if KEY not in metadata:
        return
    try:
        version = json.loads(metadata[KEY])["version"]
    except (KeyError, TypeError, ValueError, RecursionError):
        raise ValueError(
            f"the metadata {KEY!r} of {printable(file)} cannot be read; export the experts again"
        ) from None
    if version != VERSION:
        raise ValueError(
            f"{printable(file)} has version {shown(version)} of Octavo's experts and this octavo-torch reads "
            f"{VERSION}; take the one that wrote it"
        )
