"""set_recipe: gives a module that exists another recipe."""

from __future__ import annotations

from collections.abc import Sequence

from octavo import Recipe
from octavo_torch.scaling.recipe_module import ModuleOptions, RecipeModule
from octavo_torch.scaling.saved_state import STATE_BUFFERS


def set_recipe(
    module: RecipeModule,
    recipe: Recipe,
    seed: int | None,
    backend: str | Sequence[str] | None,
    layers: tuple[int, ...] = (),
) -> None:
    """Replace the module's recipe, and its buffers by those of a module before its first step, on the same device.

    seed      base of stochastic rounding's seeds; None: drawn from torch's generator
    backend   None: the module keeps its own
    layers    leading axes of the scales' buffers, as RecipeModule has them
    """
    device = next(module.parameters()).device
    backend = module.backend if backend is None else backend
    options = ModuleOptions(recipe, backend, seed, module.main_grad, module.per_group_parameters, delay_wgrad=False)
    fresh = RecipeModule({"num_groups": module.num_groups}, options, device, layers)
    for name in STATE_BUFFERS:
        if name in module._buffers:
            delattr(module, name)
        if name in fresh._buffers:
            module.register_buffer(name, fresh._buffers[name])
    # a module refuses the assignment of a recipe, which would leave the buffers of the old one
    for name in ("recipe", "backend", "_stochastic", "_stateful", "_seed", "_unused_amax"):
        module.__dict__[name] = getattr(fresh, name)
    module.reset_buffers()
    for probe in module.probes:  # of an observer that is counting
        probe.begin(recipe)
