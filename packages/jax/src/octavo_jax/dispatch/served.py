"""Plans of operations that JAX's own compute where no backend serves them."""

from __future__ import annotations

import octavo_registry as registry
from octavo import NoBackendError
from octavo_jax.dispatch.backends import BackendNames
from octavo_registry import Plan
from octavo_registry.contract.request import AnyRequest


def plan_if_served(request: AnyRequest, backend: BackendNames) -> Plan | None:
    """The plan for `request`; None where no backend of the preference serves it.

    Raises UnknownBackendError where the preference names a backend that is not installed.
    """
    try:
        return registry.plan(request, backend=backend)
    except registry.UnknownBackendError:
        raise
    except NoBackendError:
        return None
