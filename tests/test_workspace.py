"""Which files the tests of the repository look at."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from workspace import ROOT, tracked


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository of three tracked files, a virtual environment of an unusual name, and a file deleted since."""
    for name in ("README.md", "docs/guide.md", "docs/deep/page.md", "gone.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("ours\n")
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    subprocess.run(["git", "-C", str(tmp_path), "add", "."], check=True)
    (tmp_path / "gone.md").unlink()
    package = tmp_path / "my environment" / "lib" / "site-packages" / "other"
    package.mkdir(parents=True)
    (package / "README.md").write_text("not ours\n")
    return tmp_path


def test_only_files_of_the_project_are_looked_at(clone: Path) -> None:
    """A contributor may call the virtual environment in the clone whatever they like."""
    names = [str(path.relative_to(clone)) for path in tracked(root=clone)]
    assert names == ["README.md", "docs/deep/page.md", "docs/guide.md"]


def test_patterns_are_those_of_pathlib(clone: Path) -> None:
    """`*` stays in one folder, or `packages/*/README.md` would take a test's own README for a package's."""
    assert tracked("*.md", root=clone) == [clone / "README.md"]
    assert tracked("docs/**/*.md", root=clone) == [clone / "docs/deep/page.md", clone / "docs/guide.md"]


def test_no_test_walks_the_clone() -> None:
    """`ROOT.rglob` and `ROOT.glob("**")` find the files of virtual environments, too: `tracked` does not."""
    walks = ('ROOT.rglob("', 'ROOT.glob("**', "os.walk(ROOT")
    sources = [*tracked("tests/**/*.py", "packages/*/tests/**/*.py"), ROOT / "noxfile.py"]
    offenders = [file for file in sources if file != Path(__file__) and any(w in file.read_text() for w in walks)]
    assert not offenders
