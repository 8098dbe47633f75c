"""Writer: tensors into safetensors files with an index, and what a folder says about its quantization."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from octavo.errors import shown
from octavo_torch.checkpoint.formats.package import check_safetensors
from octavo_torch.checkpoint.formats.source import INDEX, KEY, VERSION

_Facts = Mapping[str, object]


class Writer:
    """A folder that is being written: its files have other names until all of them are complete."""

    def __init__(self, folder: Path, facts: _Facts, shard_bytes: int) -> None:
        """facts: the content of each file's metadata entry; ValueError for a folder that has a model in it."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"folder is {str(folder)!r} and cannot be made: {error}; give another") from None
        present = [
            path for path in (*folder.glob("*.safetensors"), folder / INDEX, folder / "config.json") if path.exists()
        ]
        if present:
            raise ValueError(f"folder has {present[0].name}, which would be replaced; give a new or empty folder")
        self._folder, self._shard_bytes = folder, shard_bytes
        self._metadata = {"format": "pt", KEY: json.dumps({"version": VERSION, **facts}, sort_keys=True)}
        self._parts: list[tuple[Path, list[str]]] = []
        self._size = 0

    def write(self, tensors: Iterable[tuple[str, Tensor]], config: _Facts, quantization: _Facts) -> None:
        """Write everything; ValueError for a name that comes twice and for what cannot be written.

        config         the content of config.json, without its quantization_config
        quantization   the quantization_config
        """
        try:
            text = _text({**config, "quantization_config": quantization})
            self._tensors(tensors)
            count = len(self._parts)
            files: dict[str, str] = {}
            for number, (part, names) in enumerate(self._parts, start=1):
                name = f"model-{number:05d}-of-{count:05d}.safetensors"
                part.rename(self._folder / name)
                files |= dict.fromkeys(names, name)
            if quantization.get("quant_method") == "modelopt":
                (self._folder / "hf_quant_config.json").write_text(_text(_modelopt_file(quantization)))
            (self._folder / "config.json").write_text(text)
            (self._folder / INDEX).write_text(_text({"metadata": {"total_size": self._size}, "weight_map": files}))
        finally:
            for part, _ in self._parts:
                part.unlink(missing_ok=True)

    def _tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        pending: dict[str, Tensor] = {}
        size, seen = 0, set[str]()
        for name, tensor in tensors:
            if name in seen:
                raise ValueError(f"others has {shown(name)}, which is a tensor of the experts; leave it out")
            seen.add(name)
            if pending and size + tensor.nbytes > self._shard_bytes:
                self._shard(pending)
                pending, size = {}, 0
            pending[name] = tensor.detach().cpu().contiguous()
            size += tensor.nbytes
        self._shard(pending)

    def _shard(self, tensors: dict[str, Tensor]) -> None:
        check_safetensors()
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        part = self._folder / f"model-{len(self._parts) + 1:05d}.part"
        self._parts.append((part, [*tensors]))
        self._size += sum(tensor.nbytes for tensor in tensors.values())
        try:
            save_file(tensors, str(part), self._metadata)
        except (OSError, SafetensorError, RuntimeError) as error:
            raise ValueError(
                f"folder is {str(self._folder)!r} and cannot be written to: {error}; give another"
            ) from None


def _text(content: _Facts) -> str:
    try:
        return json.dumps(content, indent=2, allow_nan=False) + "\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"config is not JSON: {error}; give strings, numbers, lists and mappings alone") from None


def _modelopt_file(config: _Facts) -> dict[str, object]:
    """The content of hf_quant_config.json, where readers of ModelOpt's files look first, of a quantization_config."""
    quantization = {"quant_algo": config["quant_algo"], "kv_cache_quant_algo": None, "group_size": config["group_size"]}
    return {"producer": config["producer"], "quantization": {**quantization, "exclude_modules": config["ignore"]}}
