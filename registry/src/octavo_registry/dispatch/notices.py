"""What the registry tells its user unasked: in the log which backends run, in warnings what keeps better ones out."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence

from octavo import Recipe
from octavo.caller import stacklevel_of_caller
from octavo_registry.contract.plan import Plan
from octavo_registry.contract.request import Request, describe_request
from octavo_registry.discovery.records import BackendRecord
from octavo_registry.dispatch.fallbacks import FallbackWarning, fallbacks
from octavo_registry.dispatch.memo import Memo
from octavo_registry.dispatch.preference import Preference

log = logging.getLogger("octavo")


class Notices:
    """Says each thing once."""

    def __init__(self) -> None:
        self._said: Memo[object, None] = Memo()

    def log_use(self, recipe: Recipe | None, request: Request, what: str, op: str | None = None) -> None:
        """One INFO line at the first use of a recipe for an operation on a device; `what` names the backends.

        op   "layer" for the operations of a whole layer; None: the request's
        """
        if recipe is None:
            return
        key = (recipe.fingerprint, op or request.op, request.framework, request.device, request.arch)
        if key in self._said:
            return
        self._said[key] = None
        words = describe_request(request)
        if op is not None:
            words = words.replace(request.op, "grouped linear", 1)
        log.info("%s (recipe %s) runs on: %s", words, recipe.fingerprint, what)

    def warn_of_fallbacks(
        self, plans: Sequence[Plan], records: Sequence[BackendRecord], preference: Preference | None
    ) -> None:
        """One FallbackWarning for each installed backend that cannot run and would have served on an accelerator."""
        for name, message in fallbacks(plans, records, preference):
            if (FallbackWarning, name) not in self._said:
                warnings.warn(message, FallbackWarning, stacklevel=stacklevel_of_caller())
                # after the warning: where warnings are errors, the next plan raises it again
                self._said[FallbackWarning, name] = None

    def warn(self, message: str) -> None:
        """One line at WARNING: something of a plugin is ignored."""
        if message not in self._said:
            self._said[message] = None
            log.warning(message)
