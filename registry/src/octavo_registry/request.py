"""The path of API level 4 to requests, answers and plans: `Bound` is level 4's."""

from octavo_registry.contract.backend import Backend, Refused
from octavo_registry.contract.plan import Decision, Plan, Verdict
from octavo_registry.contract.request import Request
from octavo_registry.level4.bound import Bound

__all__ = ["Backend", "Bound", "Decision", "Plan", "Refused", "Request", "Verdict"]
