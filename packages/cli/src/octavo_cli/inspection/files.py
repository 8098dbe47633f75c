"""Tensors of checkpoints, one at a time: safetensors, npz, folders of either, torch's DCP and orbax folders."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from octavo import OctavoError, Recipe
from octavo_cli.errors import InputError
from octavo_registry.contract.frameworks import PLANES

Array = NDArray[Any]

_FINGERPRINT = "recipe_fingerprint"
"""Last part of the name under which octavo_torch.recipe_state keeps a layer's fingerprint, uint8 [8]."""


@dataclass(frozen=True)
class Source:
    """A checkpoint: its tensors by name, each read when it is asked for, and the recipes that it names.

    planes    names of tensors that are codes or scales of quantized weights
    recipes   (kind, fingerprint) of each grouped layer; the kind is "" where the file has fingerprints alone
    """

    path: Path
    kind: str
    tensors: Mapping[str, Callable[[], Array]]
    recipes: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    planes: frozenset[str] = frozenset()

    @property
    def weight(self) -> str:
        """How weights are stored: "kn" as [G, K, N] by those who write orbax folders, JAX's users, else "nk"."""
        return "kn" if self.kind == "orbax" else "nk"


def open_source(path: Path, *, trust: bool = False) -> Source:
    """The checkpoint at `path`; InputError, naming it, for anything that is not one.

    trust   read the `.metadata` of a DCP folder, a pickle, which may run code
    """
    if not path.exists():
        raise InputError(f"{path}: there is no such file or folder; name a checkpoint")
    try:
        source = _of_folder(path, trust) if path.is_dir() else _of_file(path)
    except (OSError, zipfile.BadZipFile, ValueError, KeyError, TypeError) as error:
        if isinstance(error, OctavoError):
            raise
        raise InputError(f"{path} cannot be read as a checkpoint: {_brief(error)}; copy or save it again") from None
    if not source.tensors:
        raise InputError(f"{path} holds no tensors; name a checkpoint that has some")
    return source


def _brief(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _of_file(path: Path) -> Source:
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as archive:
            names = list(archive.files)

        def reader(name: str) -> Callable[[], Array]:
            def read() -> Array:
                with np.load(path, allow_pickle=False) as again:
                    values: Array = again[name]
                return values

            return read

        return Source(path, "npz", {name: reader(name) for name in names})
    if path.suffix == ".safetensors":
        return _of_safetensors(path)
    raise InputError(f"{path}: octavo inspect reads .safetensors, .npz, and folders of DCP or orbax; name one of those")


def _of_safetensors(path: Path) -> Source:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise InputError(
            f"{path} needs the package safetensors, which is not installed; pip install safetensors"
        ) from None
    try:
        with safe_open(str(path), framework="np") as file:
            names = list(file.keys())
            metadata = dict(file.metadata() or {})
    except SafetensorError as error:
        raise InputError(f"{path} is not a complete safetensors file: {_brief(error)}; copy or save it again") from None

    def reader(name: str) -> Callable[[], Array]:
        def read() -> Array:
            with safe_open(str(path), framework="np") as again:
                eight_bits = again.get_slice(name).get_dtype().startswith("F8")
                values: Array = _eight_bits(path, name) if eight_bits else again.get_tensor(name)
            return values

        return read

    tensors = {name: reader(name) for name in names}
    recipes = {**_recipes_of(metadata, path), **_fingerprints(tensors)}
    return Source(path, "safetensors", tensors, recipes, _planes(tensors))


def _eight_bits(path: Path, name: str) -> Array:
    """The bytes of an FP8 tensor, of which numpy knows no type, from a file that safetensors has checked."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        entry = json.loads(file.read(length))[name]
    first, last = entry["data_offsets"]
    raw: Array = np.fromfile(path, np.uint8, count=last - first, offset=8 + length + first)
    return raw.reshape(entry["shape"])


def _recipes_of(metadata: Mapping[str, str], path: Path) -> dict[str, tuple[str, str]]:
    """What octavo_torch.save_checkpoint wrote beside the tensors."""
    if "octavo" not in metadata:
        return {}
    try:
        header = json.loads(metadata["octavo"].partition(" ")[2])
        named = {}
        for layer, entry in header["recipes"].items():
            recipe = Recipe.from_json(json.dumps(entry["recipe"]))
            named[layer or "(the model)"] = (recipe.kind, recipe.fingerprint)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{path}: Octavo's metadata cannot be read: {_brief(error)}; save it again") from None
    return named


def _planes(tensors: Mapping[str, Callable[[], Array]]) -> frozenset[str]:
    """Codes and scales, by the names that octavo_torch.save_checkpoint gives them: "<weight>.rowwise_scale"."""
    return frozenset(name for name in tensors if name.rpartition(".")[2] in PLANES)


def _fingerprints(tensors: Mapping[str, Callable[[], Array]]) -> dict[str, tuple[str, str]]:
    found = {}
    for name, read in tensors.items():
        layer, _, last = name.rpartition(".")
        if last == _FINGERPRINT:
            found[layer or "(the model)"] = ("", bytes(read().astype(np.uint8).tolist()).hex())
    return found


def _of_folder(path: Path, trust: bool) -> Source:
    files = sorted(path.glob("*.safetensors"))
    if files:
        parts = [_of_safetensors(file) for file in files]
        tensors = {name: read for part in parts for name, read in part.tensors.items()}
        recipes = {layer: named for part in parts for layer, named in part.recipes.items()}
        return Source(path, "safetensors", tensors, recipes, _planes(tensors))
    if (path / ".metadata").is_file():
        return _of_dcp(path, trust)
    if any((path / name).exists() for name in ("_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt", "d", "default")):
        return _of_orbax(path)
    raise InputError(
        f"{path} has no .safetensors files, no .metadata of torch.distributed.checkpoint and no _METADATA of orbax; "
        "name a checkpoint's folder"
    )


def _of_dcp(path: Path, trust: bool) -> Source:
    if not trust:
        raise InputError(
            f"{path}/.metadata is a pickle, which may run code while it is read; give --trust for a checkpoint of yours"
        )
    try:
        import torch
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata
        from torch.distributed.checkpoint.state_dict_loader import load
    except ImportError:
        raise InputError(f"{path} is a checkpoint of torch, which is not installed; pip install torch") from None
    entries = FileSystemReader(path).read_metadata().state_dict_metadata

    def reader(name: str, entry: Any) -> Callable[[], Array]:
        def read() -> Array:
            values = torch.empty(entry.size, dtype=entry.properties.dtype)
            load({name: values}, storage_reader=FileSystemReader(path), no_dist=True)
            return _from_torch(values)

        return read

    tensors = {name: reader(name, entry) for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
    return Source(path, "DCP", tensors, _fingerprints(tensors))


def _from_torch(values: Any) -> Array:
    import torch

    if values.dtype is torch.bfloat16:
        bits: Array = values.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
        return bits
    eight_bits = values.dtype.itemsize == 1 and values.is_floating_point()
    plain: Array = (values.view(torch.uint8) if eight_bits else values).numpy()
    return plain


def _of_orbax(path: Path) -> Source:
    try:
        import jax
        import orbax.checkpoint as ocp  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        raise InputError(
            f"{path} is a checkpoint of orbax, which is not installed; pip install orbax-checkpoint"
        ) from None
    folder = path / "default" if (path / "default").is_dir() else path
    with ocp.PyTreeCheckpointer() as checkpointer:
        metadata = checkpointer.metadata(folder.absolute())
        shapes = getattr(metadata, "item_metadata", metadata)
        shapes = getattr(shapes, "tree", shapes)  # orbax has changed what it returns more than once
        how = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), shapes)
        tree = checkpointer.restore(folder.absolute(), restore_args=how)
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    named = {jax.tree_util.keystr(way, simple=True, separator="."): leaf for way, leaf in leaves}
    tensors = {name: (lambda leaf=leaf: np.asarray(leaf)) for name, leaf in named.items() if hasattr(leaf, "shape")}
    return Source(path, "orbax", tensors)


def why_not(source: Source, name: str, values: Array) -> str:
    """Why no recipe would quantize a tensor; "" where one would: matrices of bf16, fp16 or fp32 values."""
    if name in source.planes:
        return "codes or scales"
    if name.rpartition(".")[2] in ("amax_history", "encode_scale"):
        return "state of delayed scaling"
    if values.ndim < 2:
        return "a vector or a scalar"
    if not values.size:
        return "it is empty"
    return "" if values.dtype == np.float64 or values.dtype in _TAKEN else f"no quantizer takes {values.dtype}"


_TAKEN = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


def matrices(values: Array, weight: str = "nk") -> Array:
    """A tensor that recipes quantize as experts' matrices [G, N, K]; of more than three axes the leading ones are
    experts. With weight="kn" the last two axes are [K, N].
    """
    if values.dtype == np.float64:
        with np.errstate(over="ignore"):
            values = values.astype(np.float32)
    stack = values.reshape(-1, *values.shape[-2:])
    return stack.swapaxes(1, 2) if weight == "kn" else stack


def each_tensor(source: Source) -> Iterator[tuple[str, Array]]:
    """Name and values of every tensor, in the order of names; one at a time is in memory."""
    for name in sorted(source.tensors):
        try:
            yield name, source.tensors[name]()
        except (OSError, ValueError, TypeError, KeyError, zipfile.BadZipFile) as error:
            raise InputError(f"{source.path}: {name} cannot be read: {_brief(error)}; copy or save it again") from None
