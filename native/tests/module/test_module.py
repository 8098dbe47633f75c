"""What the module is made of: its numbers, its stub, what importing it costs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import octavo_native
from octavo_native import _native, doctor, gemms, layouts

SOURCE = Path(octavo_native.__file__).parent
NATIVE = Path(__file__).resolve().parents[2]
README = NATIVE / "README.md"
TYPES = NATIVE / "include" / "octavo"
ENUMS = {
    "DType": {"float32": "f32", "float16": "f16", "bfloat16": "bf16"},
    "Format": {},
    "Scaling": {},
    "Operand": {},
    "Direction": {},
    "Layout": {},
    "Activation": {},
    "Norm": {},
    "PrologueKind": {},
    "Gemm": {},
}
DICTS = {
    "DType": octavo_native.DTYPES,
    "Format": octavo_native.FORMATS,
    "Scaling": octavo_native.SCALINGS,
    "Operand": octavo_native.OPERANDS,
    "Direction": octavo_native.DIRECTIONS,
    "Layout": octavo_native.LAYOUTS,
    "Activation": octavo_native.ACTIVATIONS,
    "Norm": octavo_native.NORMS,
    "PrologueKind": octavo_native.PROLOGUES,
    "Gemm": octavo_native.GEMMS,
}
CLASSES = {
    name: getattr(_native, name) for name in ("InputArgs", "PlaneArgs", "PrologueArgs", "Quantizer", "Gemm", "Sequence")
}


@pytest.mark.parametrize("enum", sorted(DICTS))
def test_numbers_are_those_of_the_header(enum: str) -> None:
    """The numbers are the ABI: a plugin passes them, the FFI attributes carry them."""
    text = "".join((TYPES / name).read_text() for name in ("types.h", "quantize.h", "gemm.h"))
    body = re.search(rf"enum class {enum} : int32_t {{([^}}]*)}}", text)
    assert body is not None
    members = {name: int(number) for name, number in re.findall(r"(\w+) = (\d+)", body[1])}
    assert {ENUMS[enum].get(name, name): number for name, number in DICTS[enum].items()} == members


def test_the_abi_level_is_the_headers() -> None:
    """Both native plugins compare it at load."""
    text = (TYPES / "types.h").read_text()
    assert f"ABI_LEVEL = {octavo_native.ABI_LEVEL};" in text


def test_every_public_name_is_there() -> None:
    for name in octavo_native.__all__:
        assert hasattr(octavo_native, name)
    assert {name for name in vars(_native) if not name.startswith("_")} <= set(octavo_native.__all__)


def _stubbed() -> dict[str, list[str]]:
    """Parameters of every function and method of the stub."""
    found = {}
    for node in ast.parse((SOURCE / "_native.pyi").read_text()).body:
        functions = [node] if isinstance(node, ast.FunctionDef) else []
        prefix = ""
        if isinstance(node, ast.ClassDef) and node.name in CLASSES:
            functions, prefix = [item for item in node.body if isinstance(item, ast.FunctionDef)], f"{node.name}."
        for function in functions:
            arguments = function.args
            found[prefix + function.name] = [a.arg for a in (*arguments.args, *arguments.kwonlyargs)]
    return found


@pytest.mark.parametrize(("name", "parameters"), sorted(_stubbed().items()))
def test_the_stub_has_the_parameters_of_the_module(name: str, parameters: list[str]) -> None:
    """Type checkers read the stub, calls go to the module: a keyword of one alone fails at run time."""
    owner, _, method = name.rpartition(".")
    function = getattr(CLASSES[owner] if owner else _native, method)
    ((signature, *_),) = function.__nb_signature__
    node = ast.parse(re.sub(r"\\\d+", "...", signature) + ": ...").body[0]
    assert isinstance(node, ast.FunctionDef)
    assert [a.arg for a in (*node.args.args, *node.args.kwonlyargs)] == parameters


def test_gemms_of_the_same_names_are_one_object() -> None:
    """A layer asks for its GEMM at every call."""
    names = {"gemm": "wgrad", "scaling": "block", "left_format": "e5m2"}
    assert gemms.gemm_named(**names) is gemms.gemm_named(**names)
    assert gemms.gemm_named(**names) is not gemms.gemm_named(**names, accumulate=True)


def test_every_tile_of_a_gemm_is_a_choice_and_the_models_comes_first() -> None:
    """`octavo why --kernels` prints them; what the model takes by itself is the one with the least time."""
    gemm = gemms.gemm_named(gemm="fprop", scaling="block")
    choices = gemms.gemm_choices(gemm, rows=4096, n=2048, k=1024, groups=8)
    assert sorted(choice.tile for choice in choices) == list(range(len(gemm.tiles())))
    assert [gemm.tiles()[choice.tile] for choice in choices] == [choice.name for choice in choices]
    assert [choice.chosen for choice in choices] == [True] + [False] * (len(choices) - 1)
    times = [choice.microseconds for choice in choices]
    assert times == sorted(times)
    assert all(choice.tiles > 0 and choice.waves > 0 and 0 < choice.filled <= 1 for choice in choices)


@pytest.mark.parametrize(
    ("accumulate", "expected"), [(False, "192x128"), (True, "128x192")], ids=["stored", "added to main_grad"]
)
@pytest.mark.parametrize("shape", [(32, 7168, 4096, 32768), (8, 4096, 28672, 16384)], ids=["DSv3", "Mixtral"])
def test_a_scale_per_column_has_tiles_of_its_own(
    shape: tuple[int, int, int, int], accumulate: bool, expected: str
) -> None:
    """Where promotion takes longer than the products, the model chooses a tile that hides more of it."""
    groups, k, n, rows = shape
    sides = {"groups": groups, "k": k, "n": n, "rows": rows}
    names = {"gemm": "wgrad", "scaling": "block", "out_dtype": "float32", "accumulate": accumulate}
    names |= {} if accumulate else {"out_dtype": "bfloat16"}
    (chosen, *_) = gemms.gemm_choices(gemms.gemm_named(**names), **sides)
    assert chosen.name == expected
    for others in ({"right_square": True}, {"scaling": "current"}):
        gemm = gemms.gemm_named(**{**names, **others})
        assert not {"192x128", "128x192"} & set(gemm.tiles())
        assert gemms.gemm_choices(gemm, **sides)[0].name == "128x256"


def test_layouts_of_gemms_are_those_of_the_planes_that_they_read() -> None:
    """Rowwise planes are rows, columnwise ones panels; every GEMM reads two of x, w and dy."""
    known = {layouts.NATIVE_ROWS, layouts.NATIVE_COLUMNS}
    assert set(gemms.LAYOUTS_OF_GEMM) == set(octavo_native.GEMMS)
    for read in gemms.LAYOUTS_OF_GEMM.values():
        assert len(read) == 2
        assert set(read) <= set(octavo_native.OPERANDS)
        assert set(read.values()) <= known


def test_importing_imports_no_framework() -> None:
    """A card or `octavo doctor` may import it: neither a framework nor numpy comes with it."""
    code = "import sys, octavo_native; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(run.stdout.split())
    assert "octavo_native" in loaded
    assert not loaded & {
        "torch",
        "jax",
        "jaxlib",
        "numpy",
        "ml_dtypes",
        "scipy",
        "octavo",
        "octavo_registry",
        "pydantic",
    }


def test_the_readmes_example_runs() -> None:
    """It shows how addresses, a plan and shapes go together; a reader pastes it."""
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(block, names)
    assert names["codes"].shape == (96, 64)
    assert names["codes"].any()


def test_build_info_says_what_the_build_is() -> None:
    info = octavo_native.build_info()
    assert info["cuda"] is octavo_native.HAS_CUDA
    assert (info["nvcc"] is not None) is info["cuda"]
    assert info["archs"] == (("sm_90a",) if info["cuda"] else ())
    assert re.match(r"\w+ \d+", info["compiler"])


def test_doctor_says_which_kernels_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """With CUDA kernels their architecture; without, how to get them."""
    info = octavo_native.build_info()
    monkeypatch.setattr(doctor, "build_info", lambda: {**info, "cuda": True, "archs": ("sm_90a",), "nvcc": "13.0.88"})
    assert doctor.lines() == ["kernels for the CPU and for CUDA (sm_90a, nvcc 13.0.88)"]
    monkeypatch.setattr(doctor, "build_info", lambda: {**info, "cuda": False, "archs": (), "nvcc": None})
    alone, remedy = doctor.lines()
    assert alone.startswith("kernels for the CPU alone")
    assert "pip install" in remedy
