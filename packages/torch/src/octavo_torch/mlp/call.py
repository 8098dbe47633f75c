"""MlpCall: everything about one call of a grouped MLP but its operands; it holds the calls of its two layers."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from octavo_registry.contract.cards import Activation
from octavo_torch.arrays.grouped_tensor import PLANES
from octavo_torch.arrays.sizes import Sizes
from octavo_torch.dispatch.prepared_sizes import PrepareFunction
from octavo_torch.linear.arguments import check_state
from octavo_torch.linear.call import Call, Options
from octavo_torch.linear.contexts import unwrapped_state
from octavo_torch.linear.parameters import Parameters, anchor_of, mark_written, resolve_weight
from octavo_torch.mlp.plan import MlpPlan
from octavo_torch.recording.calls import Given, shapes_of
from octavo_torch.scaling.delayed_state import DelayedState
from octavo_torch.scaling.probe import Probe
from octavo_torch.scaling.seeds import DrawnSeed, Seed, SeedCounter, second_stream
from octavo_torch.wgrad.postponed import DelayedWgrad

States = tuple[DelayedState, DelayedState]
Probes = tuple[Probe, Probe]
Stores = tuple[DelayedWgrad | None, DelayedWgrad | None]


class Operands(NamedTuple):
    """The tensors of a call, in the order in which autograd takes them; see grouped_mlp."""

    x: Tensor
    w1: Tensor
    w2: Tensor
    probs: Tensor | None
    bias1: Tensor | None
    bias2: Tensor | None
    bias2_scales: Tensor | None


@dataclass(slots=True, eq=False)
class MlpCall(Options):
    """One call of an MLP: its options, and what `apply` resolves before the forward runs.

    second_seed     of fc2; None: seed XOR 2^63, other bits at the same positions
    states          of delayed scaling: fc1's and fc2's
    delayed_wgrad   of both weights, or of each
    probes          count what the quantizers do to the operands of fc1 and of fc2; None: not observed

    plan            the resolved MLP
    block           how many gate rows, and then up rows, alternate in w1 and bias1; 0: the gate half comes first
    fc1, fc2        the calls of the two layers; both have the same `sizes`
    """

    activation: Activation = "swiglu"
    interleave: int | None = None
    second_seed: Seed = None
    states: States | None = None
    delayed_wgrad: DelayedWgrad | Stores | None = None
    probes: Probes | None = None
    plan: MlpPlan = field(init=False)
    block: int = field(init=False)
    fc1: Call = field(init=False)
    fc2: Call = field(init=False)

    @property
    def sizes(self) -> Sizes:
        """int [G], or what `plan.prepare` returned for them."""
        return self.fc1.sizes

    @property
    def state_of_each(self) -> tuple[DelayedState | None, DelayedState | None]:
        """The state of fc1 and that of fc2."""
        return (None, None) if self.states is None else self.states

    @property
    def store_of_each(self) -> Stores:
        """The DelayedWgrad of fc1's weight and that of fc2's. What is not a pair is given to both, which check it."""
        stores = self.delayed_wgrad
        return stores if isinstance(stores, tuple) and len(stores) == 2 else (stores, stores)

    def set_layers(self, plan: MlpPlan, block: int) -> None:
        """Makes the layers' calls, without sizes."""
        self.plan, self.block = plan, block
        (state1, state2), (store1, store2) = self.state_of_each, self.store_of_each
        self.fc1 = Call(
            self.recipe, self.backend, self.group_offset, record=self.record, grad_input=self.grad_input,
            main_grad=self.main_grad, state=state1, delayed_wgrad=store1, interleave=block,
        )  # fmt: skip
        self.fc2 = Call(
            self.recipe, self.backend, self.group_offset, record=self.record, out=self.out, main_grad=self.main_grad,
            state=state2, delayed_wgrad=store2,
        )  # fmt: skip
        if self.probes is not None:
            self.fc1.probe, self.fc2.probe = self.probes
        self.fc1.layer, self.fc2.layer = plan.fc1, plan.fc2

    def resolve_weights(
        self, first: Parameters, second: Parameters, need_dw1: bool, need_dw2: bool
    ) -> tuple[Tensor, Tensor]:
        """Sets both layers' weight codes and targets. Returns w1 and w2 as autograd is given them."""
        w1 = resolve_weight(self.fc1, first, need_dw1, "w1")
        return w1, resolve_weight(self.fc2, second, need_dw2, "w2")

    @property
    def anchor(self) -> Tensor | None:
        """The tensor that requires a gradient in place of weights whose own are postponed; None if neither's is.

        The anchor of one layer is enough, since it only makes autograd run the backward at all.
        """
        anchor = anchor_of(self.fc1)
        return anchor_of(self.fc2) if anchor is None else anchor

    def unwrap_states(self) -> None:
        """Inside of a transform: `unwrapped_state` of both. What is not a pair of states is refused later."""
        if isinstance(self.states, tuple) and len(self.states) == 2:
            self.states = unwrapped_state(self.states[0]), unwrapped_state(self.states[1])

    @property
    def prepare(self) -> PrepareFunction | None:
        """What prepares group sizes; None where they are taken as they are."""
        return self.plan.prepare

    def set_sizes(self, sizes: Tensor, rows: int, like: Tensor) -> None:
        """Sets the sizes in the calls of both layers, prepared where the plan prepares them."""
        prepare = self.prepare
        self.fc1.sizes = self.fc2.sizes = sizes if prepare is None else prepare(sizes, rows, like)

    def codes_given(self) -> list[Tensor | None]:
        """The planes of weights that were quantized before the call; one that both directions share is there once."""
        given: list[Tensor | None] = []
        for codes in (self.fc1.w_codes, self.fc2.w_codes):
            planes: list[Tensor | None] = [] if codes is None else [getattr(codes, name) for name in PLANES]
            given += [
                None if any(plane is other for other in planes[:place]) else plane for place, plane in enumerate(planes)
            ]
        return given

    def state_tensors(self) -> list[Tensor]:
        """Delayed scaling's scales and histories."""
        states = [each.state for each in (self.fc1, self.fc2) if each.state is not None]
        return [tensor for state in states for tensor in (state.scale, state.history)]

    def kind(self, given: Given) -> Hashable:
        """What, with the plan, decides about the launches of a forward and of its backward on `given`."""
        return self.record, self.group_offset, self.fc1.w_codes is None, self.fc2.w_codes is None, *shapes_of(given)

    def check_states(self, like: Tensor) -> None:
        """ValueError for a state whose tensors, which a caller may have replaced, do not fit the layer."""
        for each in (self.fc1, self.fc2):
            if each.state is not None:
                check_state(each.recipe, each.state, like, each.layer.groups)

    def mark_states(self) -> None:
        """Notes for autograd that launches have changed delayed scaling's states, as `DelayedState.record` does."""
        if self.record:
            for each in (self.fc1, self.fc2):
                mark_written(None if each.state is None else each.state.history)

    def seeds(self, read: Callable[[SeedCounter], Tensor]) -> tuple[DrawnSeed, DrawnSeed]:
        """The seeds of fc1 and of fc2. `read` reads a SeedCounter: `current` in the forward, `take` in the backward."""
        first, second = (
            read(seed) if isinstance(seed, SeedCounter) else seed for seed in (self.seed, self.second_seed)
        )
        return first, second_stream(first) if second is None else second

    def release(self) -> None:
        """Drops what only forward reads."""
        self.out = None
        self.fc1.release()
        self.fc2.release()
