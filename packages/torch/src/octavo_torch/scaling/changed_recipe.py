"""set_recipe: another recipe for a module that exists."""

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
    """Replace the module's recipe; its buffers are as before the first step, on the device of its parameters.

    backend   None: the module keeps its own
    layers   leading axes of the scales' buffers, as RecipeModule has them
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
    # not by assignment, which a module refuses: it would leave the buffers of the recipe before
    for name in ("recipe", "backend", "_stochastic", "_stateful", "_seed", "_unused_amax"):
        module.__dict__[name] = getattr(fresh, name)
    module.reset_buffers()
    for probe in module.probes:  # of an observer that is counting
        probe.begin(recipe)
