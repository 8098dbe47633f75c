"""`octavo new`: a backend package of one's own, copied from the templates that Octavo's tests run."""

from __future__ import annotations

import re
import shlex
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import typer

from octavo.errors import one_of
from octavo_cli.errors import InputError, RunError

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_MOST = 40
TEMPLATES: Mapping[str, str] = MappingProxyType({"torch": "acme-octavo", "jax": "acme-octavo-jax"})
"""The template of each framework."""
DEVICES = ("cpu", "cuda")

_SKIPPED = shutil.ignore_patterns("__pycache__", ".*_cache", "*.egg-info", "build", "dist")


def new(
    name: Annotated[str, typer.Argument(help="Name of the backend: lower case, digits and hyphens, such as my-chip.")],
    out: Annotated[Path, typer.Option(help="Folder in which NAME-octavo is created.")] = Path("."),
    framework: Annotated[str, typer.Option(help="Whose arrays it takes: torch or jax.")] = "torch",
    device: Annotated[str, typer.Option(help="Where it runs: cpu or cuda.")] = "cpu",
) -> None:
    """Start a backend package: NAME-octavo, a working FP8 backend in PyTorch or JAX to change step by step.

    The one for PyTorch has quantizers and GEMMs, the one for JAX GEMMs; on the CPU it passes the conformance suite as
    it is. For CUDA it is the same code with a card for CUDA devices of compute capability 8.0 and newer.
    """
    from octavo_registry.discovery.install import how_to_install, installed_version

    target = create(name, out, framework, device)
    typer.echo(f"Made {target}. Next:")
    typer.echo(f"  pip install -e {_as_path(target)}")
    listed, tested = "octavo doctor", f"octavo conform {name}"
    typer.echo(f"  {listed:<{len(tested)}}   # lists {name}")
    typer.echo(f"  {tested}   # the conformance suite, a command of octavo-conformance")
    if installed_version("octavo-conformance") is None:
        typer.echo(f"octavo-conformance is not installed; {how_to_install('octavo-conformance')}")
    if device != "cpu":
        typer.echo(f"The card is for {device}: `octavo conform {name}` needs such a device.")


def _as_path(folder: Path) -> str:
    """`folder` for a shell, with a slash: without -e, pip seeks a bare name on an index."""
    return shlex.quote(str(folder) if len(folder.parts) > 1 else f"./{folder}")


def create(name: str, parent: Path, framework: str = "torch", device: str = "cpu") -> Path:
    """The folder `parent/NAME-octavo`, created from the template: completely, or not at all.

    InputError for a name that no backend or package can have, for an existing folder, for a parent that cannot be
    written to, and for a framework or device that there is no template for.
    """
    one_of("--framework", framework, tuple(TEMPLATES), InputError)
    one_of("--device", device, tuple(DEVICES), InputError)
    if not _NAME.fullmatch(name) or len(name) > _MOST:
        raise InputError(f"NAME is {name!r}; it is lower-case letters, digits and single hyphens, such as my-chip")
    if name in _taken_names():
        raise InputError(f"NAME is {name!r}, which belongs to another backend; take another")
    target = parent / f"{name}-octavo"
    if target.exists():
        raise InputError(f"{target} exists already; take another name or another --out")
    template = template_folder(framework)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".octavo-new-", dir=parent) as scratch:
            draft = Path(scratch) / "draft"
            shutil.copytree(template, draft, ignore=_SKIPPED)
            rename(draft, name, framework)
            for_device(draft, device)
            draft.rename(target)
    except OSError as error:
        raise InputError(f"--out {parent}: cannot be written to ({error.strerror or error})") from None
    return target


def template_folder(framework: str = "torch") -> Path:
    """A template: inside an installed package, or in the tree that an editable install points to."""
    here, name = Path(__file__).resolve(), TEMPLATES[framework]
    candidates = [here.parent / "templates" / name]
    if len(here.parents) > 4:
        candidates.append(here.parents[4] / "docs" / "examples" / name)
    for folder in candidates:
        if (folder / "pyproject.toml").is_file():
            return folder
    raise RunError(f"the template is missing from this installation ({candidates[0]}); install octavo again")


def rename(folder: Path, name: str, framework: str = "torch") -> None:
    """Put `name` in place of the template's in every file and path of `folder`, in the form that each place needs."""
    module, camel = name.replace("-", "_"), "".join(part.capitalize() for part in name.split("-"))
    forms = {"acme_octavo": f"{module}_octavo", "Acme": camel, "acme": name}
    if framework == "jax":
        forms = {"acme_jax_octavo": f"{module}_octavo", "AcmeJax": camel, "acme-jax": name}

    def renamed(text: str) -> str:
        return re.sub("|".join(forms), lambda match: forms[match.group()], text)

    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_file():
            path.write_bytes(renamed(path.read_bytes().decode()).encode())
        if renamed(path.name) != path.name:
            path.rename(path.with_name(renamed(path.name)))


def for_device(folder: Path, device: str) -> None:
    """Make the templates, which are for the CPU, ones for `device`: their code takes arrays of any."""
    if device == "cpu":
        return
    for path in (path for path in folder.rglob("*") if path.suffix in (".py", ".md", ".toml")):
        text = path.read_text(encoding="utf-8")
        changed = text.replace('device="cpu",', f'device="{device}",\n            min_arch=(8, 0),')
        path.write_text(changed.replace("on the CPU", "on CUDA devices"), encoding="utf-8")


def _taken_names() -> set[str]:
    import octavo_registry
    from octavo_registry.discovery.names import RESERVED

    return {record.name for record in octavo_registry.backends()} | set(RESERVED)
