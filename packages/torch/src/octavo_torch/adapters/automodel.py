"""NeMo Automodel's grouped experts on our GEMM, written for nemo-automodel 0.7.0.

    from octavo_torch.adapters.automodel import using

    with using(octavo.recipe("mxfp8")):
        trainer.run()

Experts with `BackendConfig(experts="torch_mm")` or `"torch_mm_mxfp8"` call `select_grouped_mm` for their product in
each forward; inside the block both get ours. Nothing is padded, and no weight is copied to another layout. Other
experts, and those that Automodel's PEFT has given adapters, compute by functions of their own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from octavo import Recipe
from octavo_torch.adapters.grouped_mm import GroupedMM, misfit

TESTED = "0.7.0"


def select_grouped_mm(
    recipe: Recipe | str | None, *, seed: int | Tensor | None = None, backend: str | Sequence[str] | None = None
) -> Callable[[bool], GroupedMM]:
    """A replacement for Automodel's function of this name: whatever its argument, it returns a `GroupedMM`."""
    product = GroupedMM(recipe, seed, backend)

    def select(use_mxfp8: bool) -> GroupedMM:
        return product

    return select


@contextmanager
def using(
    recipe: Recipe | str | None, *, seed: int | Tensor | None = None, backend: str | Sequence[str] | None = None
) -> Iterator[None]:
    """A block in which Automodel's experts multiply in `recipe`; see GroupedMM for the arguments.

    The backward of a forward in the block uses the recipe, too, wherever it runs. Warns at the end of a block in which
    no experts have asked for the product. Raises as GroupedMM does, and AdapterError where Automodel has no such
    function.
    """
    ours, asked = select_grouped_mm(recipe, seed=seed, backend=backend), False

    def select(use_mxfp8: bool) -> GroupedMM:
        nonlocal asked
        asked = True
        return ours(use_mxfp8)

    experts: Any
    try:
        from nemo_automodel.components.moe import experts  # type: ignore[import-not-found,no-redef,unused-ignore]
    except ImportError as error:
        raise misfit("nemo-automodel", TESTED, "components.moe.experts") from error
    theirs = getattr(experts, "select_grouped_mm", None)
    if theirs is None:
        raise misfit("nemo-automodel", TESTED, "components.moe.experts.select_grouped_mm")
    experts.select_grouped_mm = select
    try:
        yield
    finally:
        experts.select_grouped_mm = theirs
    if not asked:
        warnings.warn(
            "no experts of Automodel asked for their product in the block, so nothing has run in the recipe; give "
            'BackendConfig(experts="torch_mm"), and experts without adapters of Automodel\'s own',
            stacklevel=3,
        )
