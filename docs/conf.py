"""Sphinx settings: MyST pages, API pages from docstrings, a warning is an error (nox -s docs)."""

from __future__ import annotations

import gc
import sys
import tomllib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))
gc.set_threshold(100_000, 50, 100)  # pages are millions of nodes, and looking for cycles took a fifth of the time

project = "Octavo"
author = "The Octavo developers"
copyright = "2026, The Octavo developers"
release = tomllib.loads((Path(__file__).parents[1] / "packages/core/pyproject.toml").read_text())["project"]["version"]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "api_names",
    "source_pages",
    "contract_directive",
    "docstrings",
    "fault_table",
    "demotions",
    "scoreboard",
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "examples/*/README.md", "examples/*/CHANGELOG.md", "examples/*/tests"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
autoclass_content = "both"
autodoc_default_options = {
    "members": True,
    "exclude-members": "model_config, __init__, __new__",
    # of classes that bring a framework's whole interface along, what they have themselves is enough
    "inherited-members": "Module, ModuleBase, Pytree, Representable, Variable, Tensor, TensorBase, ParallelStyle, "
    "BaseModel, BaseException, tuple, dict, Protocol, Generic",
}
autodoc_inherit_docstrings = False
autodoc_mock_imports = ["qwix", "tokamax", "torchtitan", "megatron", "nemo_automodel"]  # what adapters are for
python_use_unqualified_type_names = True
# A class of one name in two front ends, such as Exchange, where linen and nnx hide annotations as text.
suppress_warnings = ["ref.python"]
python_maximum_signature_line_length = 88

html_theme = "furo"
html_title = f"Octavo {release}"
html_static_path = ["_static"]
html_css_files = ["octavo.css"]
