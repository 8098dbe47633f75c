"""Notices parameters that were given new values after their optimizer wrote them from their masters.

The optimizer's next step would undo such a change.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from octavo_torch.compiler.tracing import is_plain
from octavo_torch.linear.coded_weight import CodedWeight, values_of
from octavo_torch.optimizers.gradients import local_of
from octavo_torch.optimizers.state import stands_for

Versions = dict[Tensor, tuple[int, int]]
"""For each parameter with a master, two versions of the moment when both last agreed: the parameter's, and that of this
rank's part of it. In them torch counts changes in place: a change of a DTensor in the first, a step in the second."""

_AS_MASTERS = (
    "Create the optimizer after values are loaded, give them as masters, or copy them into "
    "optimizer.state[parameter]['master'], too"
)


def note(parameter: Tensor, master: Tensor | None, versions: Versions) -> None:
    """Called when the parameter agrees with its master, if it has one."""
    there = _counted(parameter)
    if master is not None and _has_version(there):
        versions[parameter] = parameter._version, there._version


@torch.no_grad()
def check_unchanged(
    name: str, parameter: Tensor, master: Tensor | None, versions: Versions, advice: str = _AS_MASTERS
) -> None:
    """Raises ValueError where the parameter was given values since `note` that are not its master's.

    Values are compared, and read on the host, only after a change in place and where none were noted, as for a copy's
    first step; never while a CUDA graph is captured.

    name     of the parameter, for the message
    advice   the end of the message: what to do
    """
    there = _counted(parameter)
    if master is None or not _has_version(there) or versions.get(parameter) == (parameter._version, there._version):
        return
    if there.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    if not _stands_for(local_of(master), there):
        raise ValueError(
            f"{name} was changed after this optimizer had written it, and its master was not; a step writes the "
            f"parameter from its master, and the new values would be lost. {advice}"
        )
    note(parameter, master, versions)


def _counted(parameter: Tensor) -> Tensor:
    return parameter if isinstance(parameter, CodedWeight) else local_of(parameter)


def _has_version(there: Tensor) -> bool:
    """False for tensors of a compiler's trace and of inference mode, whose changes torch does not count."""
    held = pytree.tree_leaves(there.codes) if isinstance(there, CodedWeight) else [there]
    return all(map(is_plain, held)) and not there.is_inference()


def _stands_for(master: Tensor, there: Tensor) -> bool:
    if not isinstance(there, CodedWeight):
        return _same(there, master.to(there.dtype))
    if stands_for(there, master):
        return True
    written, held = cast(CodedWeight, there.clone()), values_of(there)
    written.copy_(master)
    if _same(held, values_of(written)):
        return True
    # a state dict has had the codes' values, which loading has quantized once more
    written.copy_(values_of(written))
    return _same(held, values_of(written))


def _same(left: Tensor, right: Tensor) -> bool:
    return bool(((left == right) | (left.isnan() & right.isnan())).all())
