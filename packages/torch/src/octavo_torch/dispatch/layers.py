"""The layers that have been resolved: one for each kind of call, kept for as long as the registry stays as it is."""

from __future__ import annotations

from torch import Tensor

import octavo_registry as registry
from octavo import Recipe
from octavo_torch.arrays.checks import check_recipe
from octavo_torch.arrays.weight_order import order_of
from octavo_torch.dispatch.layer import Layer
from octavo_torch.dispatch.layer_spec import LayerRequest, LayerSpec
from octavo_torch.memo import Bounded

LayerKey = tuple[int, bool, bool, bool]
"""The id of a recipe, whether dx and dw are needed, whether plans have to be graph-safe."""


class Layers(Bounded[LayerKey, Layer]):
    """The layers that one caller used last. The caller checks the layer's fields: these are not part of the key.

    Copies and pickles are empty: bound functions stay in their process.
    """

    def __reduce__(self) -> tuple[type[Layers], tuple[()]]:
        return Layers, ()


_state_token = registry.state_token
_layers: Bounded[tuple[object, ...], Layer] = Bounded()


def layer_for(
    recipe: Recipe,
    x: Tensor,
    w: Tensor,
    at_host: bool,
    need_dx: bool,
    need_dw: bool,
    backend: str | tuple[str, ...] | None,
    graph_safe: bool = False,
) -> Layer:
    """The resolved layer for operands that fit together, found by the recipe's identity: a recipe does not change."""
    # under torch.compile(dynamic=True) sizes are symbols, which have no hash
    dtype, shape = x.dtype, tuple(map(int, w.shape))
    key = (id(recipe), dtype, shape, order_of(w), at_host, need_dx, need_dw, backend, graph_safe)
    layer = _layers.get(key)
    if layer is not None and layer.token is _state_token() and layer.recipe is recipe and x.device == layer.device:
        return layer
    check_recipe(recipe)
    request = LayerRequest.of(recipe, x, w, at_host, need_dx, need_dw, backend, graph_safe)
    layer = _layers[key] = Layer(LayerSpec.planned(request))
    return layer
