"""Files of save_checkpoint read and written again with other contents, and digests that fit these."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from octavo_torch.checkpoint.files import digest


def arrays(path: Path) -> dict[str, Tensor]:
    """The arrays of a file."""
    with safe_open(str(path), framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def metadata(path: Path) -> dict[str, Any]:
    """What a file says of its arrays and recipes."""
    with safe_open(str(path), framework="pt") as file:
        said: dict[str, Any] = json.loads(file.metadata()["octavo"].partition(" ")[2])
    return said


def rewrite(path: Path, saved: dict[str, Tensor], said: dict[str, Any]) -> None:
    """The file with other contents, and digests that fit them."""
    write(path, saved, {**said, "sha256": {name: digest(value) for name, value in saved.items()}})


def write(path: Path, saved: dict[str, Tensor], said: dict[str, Any]) -> None:
    """The file with other contents, and a digest that fits what it says."""
    text = json.dumps(said)
    save_file(saved, str(path), {"octavo": f"{hashlib.sha256(text.encode()).hexdigest()} {text}"})
