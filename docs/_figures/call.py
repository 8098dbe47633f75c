"""The figure of one call: a grouped linear layer's way from the user to the kernels, by four roads."""

from __future__ import annotations

from dataclasses import dataclass

from svg import Drawing, width_of, wrap
from workspace import ROOT

WIDTH, COLUMN, MARGIN, GAP, PAD = 1220, 280, 20, 22, 10
TORCH, TORCH_NATIVE = "packages/torch/src/octavo_torch", "packages/torch-native/src/octavo_torch_native"
CUDAGRAPH = "packages/torch-cudagraph/src/octavo_torch_cudagraph"
JAX, JAX_NATIVE = "packages/jax/src/octavo_jax", "packages/jax-native/src/octavo_jax_native"
REGISTRY, NATIVE = "registry/src/octavo_registry", "native"


@dataclass(frozen=True)
class Step:
    """One stay of a call: what happens there, and the files or folders where it does, below `package`."""

    family: str
    title: str
    what: str
    package: str
    places: tuple[str, ...]


REGISTERED = Step(
    "base", "Once per layer: a plan",
    "The first call asks the registry for the layer's operations; it binds the GEMMs first, then quantizers of the "
    "layouts that these read. Later calls compare two identities.",
    REGISTRY, ("dispatch/compose.py", "dispatch/match.py"),
)  # fmt: skip

LANES = {
    "torch, eager": (
        Step("torch", "GroupedLinear(x, group_sizes)", "Checks sizes, finds the layer's plan.", TORCH,
             ("linear/module.py", "linear/grouped.py")),
        REGISTERED,
        Step("torch", "Autograd around the whole layer", "One autograd function. Where the plan has no whole layer, or "
             "an argument asks for more, linear/autograd.py calls quantizers and GEMMs one by one: the same bits.",
             TORCH, ("linear/whole.py", "linear/autograd.py")),
        Step("torch", "One native call per pass", "Addresses go into recorded arguments; a workspace is "
             "taken from torch.", TORCH_NATIVE, ("linear/recorded_layer.py", "arrays/launch.py")),
        Step("native", "Bindings", "Integers in, checked arguments out.", NATIVE,
             ("lib/bindings/python/sequence.cpp", "lib/common")),
        Step("native", "Kernels", "Plan of the groups, quantizers, GEMM, on the caller's stream.", NATIVE,
             ("lib/cuda/rows", "lib/cuda/quantize", "lib/cuda/products")),
    ),
    "torch.compile": (
        Step("torch", "torch.compile(layer)", "dynamo sees one call and traces below it.", TORCH,
             ("compiler/tracing.py", "linear/grouped.py")),
        REGISTERED,
        Step("torch", "Autograd is traced", "Quantizers and GEMMs appear in the graph as custom operators.", TORCH,
             ("linear/autograd.py", "compiler/operators.py")),
        Step("torch", "Operators octavo_torch_native::*", "Tensors to addresses; fake implementations for the trace.",
             TORCH_NATIVE, ("quantizers/operators.py", "gemm/operators.py", "arrays/launch.py")),
        Step("native", "Bindings", "One call per quantizer or GEMM, arguments checked in C++.", NATIVE,
             ("lib/bindings/python", "lib/common")),
        Step("native", "Kernels", "The same as in eager mode.", NATIVE, ("lib/cuda",)),
    ),
    "CUDA graph": (
        Step("torch", "capture(function, ...)", "Warms up, then captures; a function that waits for the device is "
             "refused.", CUDAGRAPH, ("graphed.py", "modules.py", "step.py")),
        Step("base", "A graph-safe plan", "Inside the capture, only backends that read nothing back are eligible.",
             REGISTRY, ("dispatch/match.py",)),
        Step("torch", "The layer, as in eager mode", "Its plans take sizes, seeds and scales from the device.", TORCH,
             ("compiler/graphs.py", "linear/grouped.py")),
        Step("torch", "Backend torch-cudagraph", "torch-native's functions with device sizes only.", CUDAGRAPH,
             ("backend.py", "sizes.py")),
        Step("native", "Bindings", "Run at capture, not at replay.", NATIVE, ("lib/bindings/python",)),
        Step("native", "Kernels", "A replay finds the groups from the sizes that are on the device then.", NATIVE,
             ("lib/cuda/rows", "lib/cuda")),
    ),
    "JAX": (
        Step("jax", "grouped_dense(x, kernel, group_sizes)", "Checks arguments; with a mesh, finds how they are "
             "placed.", JAX, ("linear/grouped.py", "sharding/placement.py")),
        REGISTERED,
        Step("jax", "custom_vjp", "Quantizes x and the kernel, multiplies; residuals are the planes that backward "
             "reads.", JAX, ("linear/autograd.py", "linear/gemms.py")),
        Step("jax", "Sharding", "Shards of the kernel are quantized, then gathered; rules for Shardy and for "
             "shard_map.", JAX, ("sharding/gemms.py", "sharding/shardy_rules.py")),
        Step("jax", "Custom calls", "Under jit: ffi_call with static attributes; XLA owns results and workspace.",
             JAX_NATIVE, ("quantizers/quantizer.py", "gemm/gemm.py", "ffi/quantize.py", "ffi/gemm.py")),
        Step("native", "XLA FFI handlers and kernels", "Typed buffers in, the same kernels on XLA's stream.", NATIVE,
             ("lib/bindings/ffi", "lib/common", "lib/cuda")),
    ),
}  # fmt: skip


def draw() -> str:
    """The SVG file; raises ValueError where a file that it names is gone."""
    drawing = Drawing(WIDTH, "A grouped linear layer's way from the user's call to the kernels")
    bottom = 0.0
    for number, (name, steps) in enumerate(LANES.items()):
        x, y = MARGIN + number * (COLUMN + MARGIN), 46.0
        drawing.write(x + COLUMN / 2, 30, name, "title", "middle")
        for place, step in enumerate(steps):
            height = _content(None, step, x, y)
            drawing.box(x, y, COLUMN, height, step.family)
            _content(drawing, step, x, y)
            y += height
            if place < len(steps) - 1:
                drawing.arrow((x + COLUMN / 2, y), (x + COLUMN / 2, y + GAP - 2))
                y += GAP
        bottom = max(bottom, y)
    return drawing.text(bottom + 20)


def _content(drawing: Drawing | None, step: Step, x: float, y: float) -> float:
    """Write a step's title, sentence and files; returns the height that they take."""
    at = y + 19
    if drawing is not None:
        drawing.write(x + PAD, at, step.title, "step")
    for line in wrap(step.what, COLUMN - 2 * PAD, 11.5):
        at += 15
        if drawing is not None:
            drawing.write(x + PAD, at, line)
    at, left = at + 8, x + PAD
    import_name = step.package.rsplit("/", 1)[-1]
    for label in (import_name, *step.places):
        if label is not import_name and not (ROOT / step.package / label).exists():
            raise ValueError(f"docs/_figures/call.py names {step.package}/{label}, which does not exist")
        text = f"{label}:" if label is import_name else label
        chip = round(width_of(text, 11, mono=True) + (4 if label is import_name else 10))
        if left + chip > x + COLUMN - PAD:
            at, left = at + 22, x + PAD
        if drawing is not None and label is import_name:
            drawing.write(left, at + 13, text, "chip")
        elif drawing is not None:
            drawing.chip(left, at, text)
        left += chip + 4
    return at + 28 - y
