"""Sphinx settings: MyST pages, API pages from docstrings, a warning is an error (nox -s docs)."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "Octavo"
author = "The Octavo developers"
copyright = "2026, The Octavo developers"
release = "0.1.0"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "contract_directive",
    "contracts",
    "fault_table",
    "demotions",
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "examples/*/README.md", "examples/*/CHANGELOG.md", "examples/*/tests"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_class_signature = "mixed"
autodoc_default_options = {"exclude-members": "model_config, __init__, __new__"}
autodoc_inherit_docstrings = False

html_theme = "furo"
html_title = "Octavo"
html_static_path = ["_static"]
html_css_files = ["octavo.css"]
