"""The rules of the house: how source files lie in folders, and what they may ask of each other.

`python tests/layout.py` lists every offender of every rule; `tests/test_layout.py` fails on the first.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

from signatures import is_public, public_names, signatures
from source_tree import Tree, circles, edges, imported_modules, nodes
from workspace import ROOT, packages, tracked

MOST_FILES = 16
MOST_PARAMETERS = 8
MOST_ANY_LINES = 100

# The folders of each package, lowest first: a file may use its own folder and those before it. Some are modules beside
# folders, at any depth. Modules of the package itself that are not listed are on top of everything.
LEVELS: dict[str, tuple[str, ...]] = {
    "octavo_torch": (
        *("memo", "uncounted_steps", "compiler", "recording", "arrays", "arithmetic", "functions", "dispatch"),
        *("autograd", "wgrad"),
        *("scaling", "quantizers"),
        *("linear", "dense", "mlp", "moe", "lora", "distributed", "optimizers", "checkpoint", "reference", "adapters"),
    ),
    "octavo_jax": (
        *(
            "memo",
            "arrays",
            "arithmetic",
            "scaling",
            "functions",
            "remat",
            "array_moves",
            "sharding",
            "dispatch",
            "quantizers",
            "linear",
        ),
        *("mlp", "moe", "reference", "modules", "linen", "nnx", "optimizers", "adapters"),
    ),
    "octavo_numerics": (
        *("casts", "arrays", "philox", "hadamard", "groups", "scales", "checks", "rounding"),
        *("mxfp4", "dequantize", "quantize"),
        *("gemm", "moe", "optimizers"),
    ),
    "octavo_registry": ("contract", "level4", "discovery", "dispatch", "registry", "__init__", "cli"),
    "octavo_torch_native": ("arrays", "quantizers", "gemm", "moe", "optimizers", "linear"),
    "octavo_triton": ("layouts", "kernels", "products"),
    "octavo_torch_triton": ("arrays", "quantizers", "gemm", "moves"),
    "octavo_jax_native": ("arrays", "ffi", "quantizers", "gemm", "moe"),
    "octavo_jax_triton": ("launch", "arrays", "quantizers", "gemm"),
    "octavo_conformance": ("__init__", "cards", "problems", "oracles", "reports", "suite"),
    "octavo_cli": (
        *("errors", "own_scales", "ranks", "page", "inspection"),
        *("train/config", "train/data", "train/models", "train/report", "train"),
    ),
    "octavo_bench": (
        *("errors", "harness", "peers", "quantize", "training", "step", "gemm", "tiles", "host", "mlp", "moe", "ep"),
        "remat",
    ),
    "native": (
        *("include/octavo", "lib/common"),
        *("lib/cpu/loops", "lib/cpu/planes", "lib/cpu/quantize", "lib/cpu/gemm", "lib/cpu/rows", "lib/cpu/scaling"),
        *("lib/cuda/device", "lib/cuda/planes", "lib/cuda/scaling", "lib/cuda/tile", "lib/cuda/units"),
        "lib/cuda/activations",
        *("lib/cuda/turns", "lib/cuda/reductions", "lib/cuda/quantize", "lib/cuda/weights", "lib/cuda/calls"),
        *("lib/cuda/gemm", "lib/cuda/products", "lib/cuda/rows", "lib/cuda/optimizers"),
        *("lib/bindings/python", "lib/bindings/ffi"),
    ),
}

# Modules other than a package itself that users import from; their names are public, too.
PUBLIC_MODULES: dict[str, tuple[str, ...]] = {
    "octavo_torch": (
        *("plugin_api", "adapters.automodel", "adapters.megatron", "adapters.megatron_checkpoint"),
        *("adapters.torchtitan", "adapters.transformers", "adapters.frozen", "adapters.peft"),
    ),
    "octavo_jax": ("plugin_api", "linen", "nnx", "moe", "optimizers", "adapters", "adapters.qwix", "adapters.tokamax"),
    "octavo_registry": ("contract",),
    "octavo_native": ("layouts", "gemms"),  # its README has readers import them
}

# Packages of kernels, which take two doors and no other: the registry's contract and their front end's plugin_api.
PLUGINS = (
    *("octavo_torch_native", "octavo_torch_cudagraph", "octavo_torch_triton", "octavo_jax_native"),
    "octavo_jax_triton",
    *("acme_octavo", "acme_jax_octavo"),
)
DOORS: dict[str, tuple[str, ...]] = {
    "octavo_torch": ("octavo_torch.plugin_api",),
    "octavo_jax": ("octavo_jax.plugin_api",),
    "octavo_registry": ("octavo_registry", "octavo_registry.contract"),
}

# Packages whose objects meet at run time: what one needs to know of the other stands in a type, not in a question.
TYPED = (
    "octavo_torch",
    "octavo_torch_native",
    "octavo_torch_triton",
    "octavo_jax",
    "octavo_jax_native",
    "octavo_jax_triton",
    "octavo_registry",
)
COUNTED_ANY = ("octavo_torch", "octavo_torch_native")
WRITES_SIGNATURES_DOWN = ("api_level.py", "whole_signature.py")  # golden files of the hooks; what `help` shows

TEMPLATES = ("docs/examples/acme-octavo/src/acme_octavo", "docs/examples/acme-octavo-jax/src/acme_jax_octavo")


@cache
def trees() -> dict[str, Tree]:
    """The Python packages by import name, the plugin templates, and the C++ sources as "native"."""
    by_name = {}
    for source in [*(package.source for package in packages().values()), *(ROOT / each for each in TEMPLATES)]:
        by_name[source.name] = Tree.from_files(source.name, source, tracked("**/*.py", root=source))
    native = ROOT / "native"
    files = tracked("include/**", "lib/**", root=native)
    by_name["native"] = Tree.from_files(
        "native", native, files, (native / "lib", native / "lib" / "cuda", native / "include")
    )
    return by_name


def wide_folders(tree: Tree) -> Iterator[str]:
    """Folders with more files than a reader takes in at a glance; an __init__.py does not count."""
    count = Counter(file.parent for file in tree.files if file.name != "__init__.py")
    for folder, files in sorted(count.items()):
        if files > MOST_FILES:
            yield f"{_place(tree, folder)} has {files} source files; {MOST_FILES} is the most"


def _place(tree: Tree, path: Path) -> str:
    return (Path(tree.name) / path.relative_to(tree.folder)).as_posix()


def import_circles(tree: Tree) -> Iterator[str]:
    """Files that need each other."""
    for circle in circles(edges(tree)):
        yield f"{tree.name}: " + " -> ".join(tree.relative(file) for file in circle)


def upward_imports(tree: Tree, folders: tuple[str, ...]) -> Iterator[str]:
    """Imports from a lower folder into a higher one, folders without a place in the order, places without a folder."""
    places = {file: _folder(tree, file, folders) for file in tree.files}
    for name in sorted(set(folders) - set(places.values())):
        yield f"{tree.name}: LEVELS names {name}, of which there is no file"
    for folder in sorted({file.parent for file in places if places[file] is None}):
        yield f"{_place(tree, folder)} has no place in LEVELS"
    rank = {name: number for number, name in enumerate((*folders, ""))}
    for file, targets in edges(tree).items():
        for target in targets:
            above, below = places[target], places[file]
            if above is not None and below is not None and rank[below] < rank[above]:
                yield f"{tree.name}: {tree.relative(file)} imports {tree.relative(target)}, which lies above it"


def _folder(tree: Tree, file: Path, folders: tuple[str, ...]) -> str | None:
    """The folder of a file: the longest name in `folders` that it lies in, "" for a module on top, None for nowhere."""
    parts = file.relative_to(tree.folder).with_suffix("").parts
    ways = ["/".join(parts[:length]) for length in range(len(parts), 0, -1)]
    return next((way for way in ways if way in folders), "" if len(parts) == 1 else None)


def wide_signatures(trees: list[Tree], public_modules: dict[str, tuple[str, ...]]) -> Iterator[str]:
    """Functions with too many parameters that no user calls.

    Public are the names in `__all__` of a package and of its public modules, the methods of public classes, methods
    that implement one of those with the same parameters, and the functions behind commands, whose parameters are the
    command's options. torch.autograd.Function prescribes the parameters of its methods, and Triton takes structures of
    nothing.
    """
    everything = [(tree, signature) for tree in trees for file in tree.python for signature in signatures(file)]
    public = {
        name for tree in trees for name in public_names(tree, ("", *public_modules.get(tree.name, ())))
    } | _commands(trees)
    contracts = {(each.name, each.parameters) for _, each in everything if each.owner and is_public(each, public)}
    for tree, each in everything:
        implements = bool(each.owner) and (each.name, each.parameters) in contracts
        excepted = each.is_command or each.is_kernel or each.is_autograd or implements or is_public(each, public)
        if len(each.parameters) > MOST_PARAMETERS and not excepted:
            name = f"{each.owner}.{each.name}" if each.owner else each.name
            yield f"{tree.name}/{tree.relative(each.file)}:{each.line} {name} takes {len(each.parameters)} parameters"


def _commands(trees: list[Tree]) -> set[tuple[Path, str]]:
    """Functions that are registered as commands: named "module:function", or given to an app's `command()`."""
    texts = [file.read_text() for tree in trees for file in tree.python]
    texts += [(package.directory / "pyproject.toml").read_text() for package in packages().values()]
    by_module = {tree.module(file): file for tree in trees for file in tree.python}
    named = {pair for text in texts for pair in re.findall(r'"([\w.]+):(\w+)"', text)}
    named |= {
        (module, function)
        for tree in trees
        for file in tree.python
        for function in re.findall(r"\.command\([^)]*\)\((\w+)\)", file.read_text())
        for module, name in imported_modules(file)
        if name == function
    }
    return {(by_module[module], function) for module, function in named if module in by_module}


def questions_at_run_time(tree: Tree, own_attributes: set[str]) -> Iterator[str]:
    """Protocols that no type checker sees: `inspect.signature`, `locals()`, and `hasattr` for an attribute of ours.

    Asking an object of a library which attributes it has is another matter: its versions are not ours.
    """
    for file in tree.python:
        for node in nodes(file):
            if not isinstance(node, ast.Call):
                continue
            function = ast.unparse(node.func)
            attribute = node.args[1] if function == "hasattr" and len(node.args) == 2 else None
            is_ours = isinstance(attribute, ast.Constant) and attribute.value in own_attributes
            reflects = function in ("inspect.signature", "signature") and file.name not in WRITES_SIGNATURES_DOWN
            if is_ours or reflects or function == "locals":
                yield f"{tree.name}/{tree.relative(file)}:{node.lineno} {ast.unparse(node)}"


def attributes(trees: Iterable[Tree]) -> set[str]:
    """Names of the attributes that our classes declare and that our code sets."""
    names: set[str] = set()
    for file in (file for tree in trees for file in tree.python):
        for node in nodes(file):
            if isinstance(node, ast.ClassDef):
                functions = (item.name for item in node.body if isinstance(item, ast.FunctionDef))
                fields = (ast.unparse(item.target) for item in node.body if isinstance(item, ast.AnnAssign))
                names |= {*functions, *fields}
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
    return {name for name in names if not name.startswith("_")}


def lines_with_any(tree: Tree) -> Iterator[str]:
    """Lines on which something is annotated as Any."""
    for file in tree.python:
        names = (node for node in nodes(file) if isinstance(node, ast.Name) and node.id == "Any")
        for line in sorted({node.lineno for node in names}):
            yield f"{tree.name}/{tree.relative(file)}:{line}"


def other_doors(tree: Tree, doors: dict[str, tuple[str, ...]]) -> Iterator[str]:
    """Imports of a package past the modules that it offers to plugins."""
    for file in tree.python:
        for module, name in sorted(set(imported_modules(file))):
            allowed = doors.get(module.split(".")[0])
            if allowed is None or f"{module}.{name}" in allowed:
                continue
            names_a_submodule = name and _is_module(f"{module}.{name}")
            if module not in allowed or names_a_submodule:
                yield f"{tree.name}/{tree.relative(file)} imports {f'{module}.{name}'.rstrip('.')}"


@cache
def _is_module(name: str) -> bool:
    package, *parts = name.split(".")
    source = trees().get(package)
    return source is not None and bool(parts) and name in {source.module(file) for file in source.python}


@cache
def offenders() -> dict[str, list[str]]:
    """Every rule, as a sentence, with whatever breaks it."""
    ours = [each for name, each in trees().items() if name not in {Path(template).name for template in TEMPLATES}]
    python = [each for each in ours if each.name != "native"]
    typed = [each for each in ours if each.name in TYPED]
    own = attributes(python)
    plugins = [each for name, each in trees().items() if name in PLUGINS]
    any_lines = [line for name in COUNTED_ANY for line in lines_with_any(trees()[name])]

    def over(chosen: list[Tree], check: Callable[[Tree], Iterator[str]]) -> list[str]:
        return [line for each in chosen for line in check(each)]

    return {
        f"a folder has at most {MOST_FILES} source files": over(ours, wide_folders),
        "no files import each other in a circle": over(ours, import_circles),
        "imports lead to the same folder or to a lower one": over(
            [each for each in ours if each.name in LEVELS or each.has_folders],
            lambda each: upward_imports(each, LEVELS.get(each.name, ())),
        ),
        f"a function takes at most {MOST_PARAMETERS} parameters, unless it is public": sorted(
            wide_signatures(python, PUBLIC_MODULES)
        ),
        "what one object asks of another stands in its type": over(
            typed, lambda each: questions_at_run_time(each, own)
        ),
        f"fewer than {MOST_ANY_LINES} lines of {' and '.join(COUNTED_ANY)} are annotated as Any": (
            any_lines if len(any_lines) >= MOST_ANY_LINES else []
        ),
        "plugins import the registry's contract and their front end's plugin_api alone": over(
            plugins, lambda each: other_doors(each, DOORS)
        ),
    }


def main() -> int:
    for rule, lines in offenders().items():
        print(f"RED ({len(lines)})  {rule}" if lines else f"ok  {rule}")
        print("".join(f"    {line}\n" for line in lines), end="")
    return int(any(offenders().values()))


if __name__ == "__main__":
    sys.exit(main())
