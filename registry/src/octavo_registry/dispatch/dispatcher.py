"""From a request to a plan: which backends may serve it, in which order, and which of them binds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import pluggy

from octavo import NoBackendError, Recipe
from octavo_registry.contract.backend import Backend, KernelChoice, Refused
from octavo_registry.contract.bound import Bound
from octavo_registry.contract.cards import QUANTIZERS
from octavo_registry.contract.plan import Decision, Plan
from octavo_registry.contract.request import GemmRequest, Request
from octavo_registry.discovery.guard import Fault, guard
from octavo_registry.discovery.install import how_to_install
from octavo_registry.discovery.loader import Plugin, call
from octavo_registry.discovery.names import RESERVED
from octavo_registry.discovery.needs import missing_need
from octavo_registry.discovery.records import BackendRecord
from octavo_registry.dispatch.answers import ask_bound, ask_everywhere, ask_kernels
from octavo_registry.dispatch.candidates import SERVES, Candidate, Candidates, filter_cards
from octavo_registry.dispatch.compose import compose
from octavo_registry.dispatch.layer_plan import LayerPlan, computed_words
from octavo_registry.dispatch.layer_requests import OWN_DTYPES, LayerDtypes
from octavo_registry.dispatch.memo import Memo
from octavo_registry.dispatch.notices import Notices
from octavo_registry.dispatch.preference import REST, Preference, UnknownBackendError, current, from_argument, source_of
from octavo_registry.dispatch.report import explain_failure
from octavo_registry.dispatch.rounding import asked_of_backends, with_rounding
from octavo_registry.level4.adapter import LEVEL, AdaptedBackend

Names = str | Sequence[str] | None


class Dispatcher:
    """Plans for one fixed set of backends. A registry that changes makes another, so its caches never go stale."""

    def __init__(
        self,
        records: Sequence[BackendRecord],
        plugins: Sequence[Plugin],
        manager: pluggy.PluginManager,
        lock: AbstractContextManager[object],
    ) -> None:
        self.records = tuple(records)
        self._plugins = {plugin.name: plugin for plugin in plugins}
        self._manager = manager
        self._lock = lock
        self._loaded: dict[str, Backend | Fault] = {}
        self._candidates_of: Memo[tuple[Request, Preference | None], Candidates] = Memo()
        self._plans: Memo[tuple[Request, Preference | None], Plan] = Memo()
        self._layers: Memo[tuple[GemmRequest, Preference | None, LayerDtypes], LayerPlan] = Memo()
        self._notices = Notices()

    # ---- what the registry is asked

    def plan(self, request: Request, backend: Names) -> Plan:
        """The cached plan, or a new one; NoBackendError with every verdict."""
        preference = self._preference(backend)
        plan = self._plans.get((request, preference))
        if plan is None:
            with self._lock:
                plan = self._finish(self._candidates(request, preference), preference)
                self._notices.warn_of_fallbacks([plan], self.records, preference)
                self._notices.log_use(plan.request.recipe, plan.request, f"{plan.backend}{_noted(plan)}")
        return plan

    def explain(self, request: Request, backend: Names) -> tuple[Decision, ...]:
        """The verdicts of `plan`, whether or not something serves."""
        preference = self._preference(backend)
        with self._lock:
            candidates = self._candidates(request, preference)
            return candidates.decisions(0 if candidates.at(0) is not None else None)

    def hypothesize(self, request: Request, backend: Names) -> tuple[Decision, ...]:
        """The verdicts of cards and shape rules, for a device that need not be here: nothing is bound."""
        preference = self._preference(backend)
        with self._lock:
            request = asked_of_backends(request)
            order, others = filter_cards(self.records, request, preference)
            judged = [(one, *self._refused_everywhere(one, request)) for one in self._ranked(request, order)]
            serving = [candidate for candidate, refusal, _ in judged if not refusal]
            verdicts: list[Decision] = []
            for candidate, refusal, unknown in judged:
                if refusal:
                    verdicts.append(candidate.record.decision("refused", refusal))
                    continue
                first, *later = serving
                chosen = candidate is first
                reason = candidate.chosen_over(later, request) if chosen else f"{SERVES}; {first.name} comes first"
                reason = candidate.with_untried(f"{candidate.with_emulated(reason, request)}{unknown}")
                verdicts.append(candidate.record.decision("chosen" if chosen else "eligible", reason))
            return (*verdicts, *others)

    def plan_layer(self, request: GemmRequest, backend: Names, dtypes: LayerDtypes = OWN_DTYPES) -> LayerPlan:
        """The cached composition, or a new one; NoBackendError of the operation that nothing serves."""
        if request.op != "fprop":
            raise ValueError(
                f"plan_layer takes the layer's fprop request with its whole recipe; got op={request.op!r}, "
                f"recipe={'None' if request.recipe is None else request.recipe.kind}"
            )
        preference = self._preference(backend)
        key = (request, preference, dtypes)
        layer = self._layers.get(key)
        if layer is None:
            with self._lock:
                layer = self._layers[key] = self._compose(request, preference, dtypes)
        return layer

    def kernel_choices(
        self, request: GemmRequest, rows: int, backend: Names
    ) -> tuple[str, tuple[KernelChoice, ...] | None]:
        """The backend that serves `request`, and what it says of its kernels; None: it has no model."""
        name = self.plan(request, backend).backend
        record = next(record for record in self.records if record.name == name and record.verdict is None)
        with self._lock:
            return name, ask_kernels(self._load(record), name, request, rows)

    # ---- which backends may serve

    def check_backend(self, backend: Names) -> None:
        """Raises UnknownBackendError as a plan does, but not for Octavo's own names, whose packages may come later."""
        named = [name for name in from_argument(backend) or () if name not in RESERVED]
        if named:
            self._preference(named)

    def _preference(self, backend: Names) -> Preference | None:
        preference = from_argument(backend)
        if preference is None:
            preference = current()
        known = {record.name for record in self.records}
        for name in preference or ():
            if name != REST and name not in known:
                if name in RESERVED:
                    raise UnknownBackendError(
                        f"{source_of(backend)}: {name!r} is not installed; {how_to_install(RESERVED[name])}"
                    )
                installed = f"known names are {', '.join(sorted(known))}" if known else "no backend is installed"
                raise UnknownBackendError(f"{source_of(backend)}: there is no backend {name!r}; {installed}")
        return preference

    def _candidates(self, request: Request, preference: Preference | None) -> Candidates:
        """The candidates for `request`. They are remembered if one of them binds, so that each is bound once."""
        key = (request, preference)
        candidates = self._candidates_of.get(key)
        if candidates is None:
            asked = asked_of_backends(request)
            order, others = filter_cards(self.records, asked, preference)
            candidates = Candidates(request, self._ranked(asked, order), others, self._bind)
            if candidates.at(0) is not None:
                self._candidates_of[key] = candidates
        return candidates

    def _ranked(self, request: Request, order: list[Candidate]) -> list[Candidate]:
        """`order`, rearranged by the first `octavo_rank` hook that returns a permutation of it.

        Other answers of hooks are ignored, and logged once.
        """
        names = tuple(candidate.name for candidate in order)
        if len(names) < 2:
            return order
        for hook in reversed(self._manager.hook.octavo_rank.get_hookimpls()):
            try:
                opinion = call(hook, request=request, eligible=names)
                ranked = None if opinion is None else guard(tuple, opinion)
            except Fault as fault:
                self._notices.warn(f"octavo_rank of plugin {hook.plugin_name} raised {fault}; it is ignored")
                continue
            if ranked is None:
                continue
            # a subclass of str may define its own comparison, so plain strings are compared
            given = [
                str.__str__(name) if issubclass(type(name), str) else f"a {type(name).__name__}" for name in ranked
            ]
            if sorted(given) != sorted(names):
                self._notices.warn(
                    f"octavo_rank of plugin {hook.plugin_name} gave {given}, no permutation of {list(names)}; "
                    "it is ignored"
                )
                continue
            by_name = {candidate.name: candidate for candidate in order}
            return [by_name[name] for name in given]
        return order

    # ---- which of them binds

    def _load(self, record: BackendRecord) -> Backend:
        loaded = self._loaded.get(record.name)
        if loaded is None:
            try:
                # only the plugin that published the card loads its backend
                answer: Backend | None = call(self._plugins[record.plugin].hooks["octavo_load"], name=record.name)
                if answer is None:
                    raise Fault(f"octavo_load({record.name!r}) returned None, and the plugin's card names it")
                if isinstance(answer, type):
                    name = answer.__name__
                    raise Fault(f"octavo_load({record.name!r}) returned the class {name}; return an object, {name}()")
                level4 = record.card is not None and record.card.api_level <= LEVEL
                loaded = AdaptedBackend(answer) if level4 else answer
            except Fault as fault:
                loaded = Fault(missing_need(record.distribution, fault) or str(fault))
            self._loaded[record.name] = loaded
        if isinstance(loaded, Fault):
            raise loaded
        return loaded

    def _refused_everywhere(self, candidate: Candidate, request: Request) -> tuple[str, str]:
        """Two texts: why the backend serves the request on no machine, or ""; and why that is not known, or ""."""
        try:
            return ask_everywhere(self._load(candidate.record), request) or "", ""
        except Fault as fault:
            return "", f"; its shape rules are not known here ({fault})"

    def _bind(self, candidate: Candidate, request: Request) -> Bound | Decision:
        record = candidate.record
        try:
            return with_rounding(ask_bound(self._load(record), asked_of_backends(request)), request)
        except Fault as fault:
            if isinstance(fault.__cause__, Refused):
                return record.decision("refused", str(fault.__cause__))
            return record.decision("broken", missing_need(record.distribution, fault) or str(fault))

    # ---- plans

    def _finish(
        self,
        candidates: Candidates,
        preference: Preference | None,
        index: int = 0,
        passed_over: Mapping[int, str] | None = None,
    ) -> Plan[Any, Any]:
        """The plan of the `index`-th candidate that binds. It is remembered if it is the first.

        Hooks see it in `octavo_plan_made`.
        """
        key = (candidates.request, preference)
        if index == 0 and key in self._plans:
            return self._plans[key]
        serving = candidates.at(index)
        if serving is None:
            raise self._no_backend(candidates)
        candidate, bound = serving
        # quantizers produce the same bits everywhere; only products can be emulated
        quantizes = candidates.request.op in QUANTIZERS or candidates.request.op == "dequantize"
        emulated = None if quantizes else candidate.row.emulated
        plan = Plan(
            request=candidates.request,
            backend=candidate.name,
            bound=bound,
            note=bound.note or (f"emulated: {emulated}" if emulated else ""),
            decisions=candidates.decisions(index, passed_over),
            capability=candidate.row,
        )
        if index == 0:
            self._plans[key] = plan
        for hook in self._manager.hook.octavo_plan_made.get_hookimpls():
            try:
                call(hook, plan=plan, request=plan.request)
            except Fault as fault:
                self._notices.warn(f"octavo_plan_made of plugin {hook.plugin_name} raised {fault}; the plan stands")
        return plan

    def _no_backend(self, candidates: Candidates, recipe: Recipe | None = None) -> NoBackendError:
        decisions = candidates.decisions()
        text = explain_failure(candidates.request, decisions, self.records)
        if recipe is not None and recipe.computed_as is not recipe:
            text += f"\n  The layer's recipe is {recipe.kind} ({recipe.fingerprint}){computed_words(recipe)}"
        return NoBackendError(text, decisions)

    def _compose(self, request: GemmRequest, preference: Preference | None, dtypes: LayerDtypes) -> LayerPlan:
        recipe = request.recipe
        composition = compose(request, recipe, lambda asked: self._candidates(asked, preference), dtypes)
        if isinstance(composition, Candidates):
            raise self._no_backend(composition, recipe)
        gemms = {
            gemm: self._finish(candidates, preference, index, composition.passed_over.get(gemm))
            for gemm, (candidates, index) in composition.gemms.items()
        }
        operands = {
            operand: self._finish(candidates, preference) for operand, candidates in composition.quantizers.items()
        }
        layer = LayerPlan(
            recipe=recipe,
            fprop=gemms["fprop"],
            dgrad=gemms.get("dgrad"),
            wgrad=gemms.get("wgrad"),
            quantize_x=operands.get("x"),
            quantize_w=operands.get("w"),
            quantize_dy=operands.get("dy"),
            weight=request.weight,
        )
        self._notices.warn_of_fallbacks([*gemms.values(), *operands.values()], self.records, preference)
        parts = [f"quantize {operand} {plan.backend}" for operand, plan in operands.items()]
        parts += [f"{gemm} {plan.backend}{_noted(plan)}" for gemm, plan in gemms.items()]
        self._notices.log_use(recipe, request, ", ".join(parts), op="layer")
        return layer


def _noted(plan: Plan) -> str:
    return f" ({plan.note})" if plan.note else ""
