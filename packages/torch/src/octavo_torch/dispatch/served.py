"""Plans of operations that torch's own compute where no backend serves them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import octavo_registry as registry
from octavo import NoBackendError
from octavo_registry import Plan
from octavo_registry.contract.request import Request


def plan_if_served(request: Request, backend: str | Sequence[str] | None = None) -> Plan[Any, Any] | None:
    """The plan for `request`; None where no backend of the preference serves it.

    Raises UnknownBackendError where the preference names a backend that is not installed: another one, or torch, would
    take the place of what was meant.
    """
    try:
        return registry.plan(request, backend=backend)
    except registry.UnknownBackendError:
        raise
    except NoBackendError:
        return None
