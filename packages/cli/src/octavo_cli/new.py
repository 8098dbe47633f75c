"""`octavo new`: a backend package of one's own, copied from the template that Octavo's tests run."""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from octavo_cli.errors import InputError, RunError

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_MOST = 40
_SKIPPED = shutil.ignore_patterns("__pycache__", ".*_cache", "*.egg-info", "build", "dist")


def new(
    name: Annotated[str, typer.Argument(help="Name of the backend: lower case, digits and hyphens, such as my-chip.")],
    out: Annotated[Path, typer.Option(help="Folder in which NAME-octavo is created.")] = Path("."),
) -> None:
    """Start a backend package: NAME-octavo, a working FP8 backend on the CPU to change step by step."""
    target = create(name, out)
    typer.echo(f"Made {target}. Next:")
    typer.echo(f"  pip install -e {target}")
    typer.echo(f"  octavo doctor                      # lists {name}")
    typer.echo(f"  octavo conform {name}   # the conformance suite; pip install octavo-conformance first")


def create(name: str, parent: Path) -> Path:
    """The folder `parent/NAME-octavo`, created from the template: completely, or not at all.

    InputError for a name that no backend or package can have, for an existing folder and for a parent that cannot
    be written to.
    """
    if not _NAME.fullmatch(name) or len(name) > _MOST:
        raise InputError(f"NAME is {name!r}; it is lower-case letters, digits and single hyphens, such as my-chip")
    if name in _taken_names():
        raise InputError(f"NAME is {name!r}, which belongs to another backend; take another")
    target = parent / f"{name}-octavo"
    if target.exists():
        raise InputError(f"{target} exists already; take another name or another --out")
    template = template_folder()
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".octavo-new-", dir=parent) as scratch:
            draft = Path(scratch) / "draft"
            shutil.copytree(template, draft, ignore=_SKIPPED)
            rename(draft, name)
            draft.rename(target)
    except OSError as error:
        raise InputError(f"--out {parent}: cannot be written to ({error.strerror or error})") from None
    return target


def template_folder() -> Path:
    """The template: inside an installed package, or in the tree that an editable install points to."""
    here = Path(__file__).resolve()
    candidates = [here.parent / "template"]
    if len(here.parents) > 4:
        candidates.append(here.parents[4] / "docs" / "examples" / "acme-octavo")
    for folder in candidates:
        if (folder / "pyproject.toml").is_file():
            return folder
    raise RunError(f"the template is missing from this installation ({candidates[0]}); install octavo again")


def rename(folder: Path, name: str) -> None:
    """Put `name` in place of "acme" in every file and every path of `folder`, in the form that each place needs."""
    forms = {
        "acme_octavo": f"{name.replace('-', '_')}_octavo",
        "Acme": "".join(part.capitalize() for part in name.split("-")),
        "acme": name,
    }

    def renamed(text: str) -> str:
        return re.sub("|".join(forms), lambda match: forms[match.group()], text)

    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_file():
            path.write_bytes(renamed(path.read_bytes().decode()).encode())
        if renamed(path.name) != path.name:
            path.rename(path.with_name(renamed(path.name)))


def _taken_names() -> set[str]:
    import octavo_registry
    from octavo_registry.discovery.names import RESERVED

    return {record.name for record in octavo_registry.backends()} | set(RESERVED)
