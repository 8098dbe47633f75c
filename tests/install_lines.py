"""The commands of a document that install our packages."""

from __future__ import annotations

import re


def install_lines(text: str) -> list[str]:
    """Commands in console blocks and in sentences: from the clone, from dist/, and from an index."""
    commands = re.findall(r"^\$ (pip install [^#\n]*[^#\s])", text, flags=re.MULTILINE)
    commands += re.findall(r"`(pip install [^`]*)`", text)
    return [command for command in commands if re.search(r'\./(?:packages|native|registry)|"octavo', command)]
