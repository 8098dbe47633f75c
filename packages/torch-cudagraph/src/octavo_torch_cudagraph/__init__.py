"""Octavo in CUDA graphs: the backend torch-cudagraph, and helpers that capture a function, a module or a training step.

Importing this package imports no torch: a registry that only reads the backend's card (`octavo_torch_cudagraph.plugin`)
pays nothing for it. The first use of a public name does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo_torch.plugin_api import GraphUnsafeError, graph_safe
    from octavo_torch_cudagraph.graphed import Graphed, capture
    from octavo_torch_cudagraph.modules import make_graphed
    from octavo_torch_cudagraph.pipeline import GraphedPipeline, make_graphed_pipeline
    from octavo_torch_cudagraph.step import graphed_step
    from octavo_torch_cudagraph.weights import StaticWeight

__version__ = "0.2.0"

__all__ = [
    "GraphUnsafeError",
    "Graphed",
    "GraphedPipeline",
    "StaticWeight",
    "capture",
    "graph_safe",
    "graphed_step",
    "make_graphed",
    "make_graphed_pipeline",
]


if not TYPE_CHECKING:  # a type checker would take any name, misspelt ones too, for one of this module's

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from octavo_torch import plugin_api
        from octavo_torch_cudagraph import graphed, modules, pipeline, step, weights

        for place in (plugin_api, graphed, modules, pipeline, step, weights):
            globals().update({public: value for public, value in vars(place).items() if public in __all__})
        return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
