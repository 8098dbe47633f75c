"""Recorder: the launches that a pass of the front end makes, recorded while it makes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType

from torch import Tensor

import octavo_native
from octavo_torch.plugin_api import status_word
from octavo_torch_native.arrays.launch import listening, run

_STATUS_BYTES = 4


class Recorder:
    """See octavo_registry.contract.recording.Recorder.

    The status word, which stays where it is, is the sequence's first array, and the caller's numbers begin behind it.
    """

    def __init__(self, like: Tensor) -> None:
        self.refusal: str | None = None
        self._device = like.device
        self._sequence = octavo_native.Sequence(cuda=like.is_cuda)
        self._status = status_word(like.device).data_ptr()
        self._sequence.name(self._status, _STATUS_BYTES)

    def __enter__(self) -> Recorder:
        """From now on launches of this thread are recorded. One recorder at a time: AssertionError."""
        assert listening.listener is None
        listening.listener = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        """Stops recording."""
        listening.listener = None

    def name(self, start: int, size: int, replaces: bool, /) -> None:
        """The next number is that of these bytes."""
        self._sequence.name(start, size, replaces)

    def add(self, call: Callable[..., None], like: Tensor, arguments: Mapping[str, object], recordable: bool) -> None:
        """Records a launch."""
        if self.refusal is not None:
            return
        if not recordable or like.device != self._device:
            self.refusal = f"{call} on {like.device} is not recorded"
            return
        try:
            call(cuda=like.is_cuda, into=self._sequence, **arguments)
        except ValueError as error:  # an array that nobody named
            self.refusal = str(error)

    def arrays(self) -> list[list[int]]:
        """The caller's numbers of each launch's arrays."""
        return [[number - 2 for number in numbers if number > 1] for numbers in self._sequence.arrays()]

    def run(self, addresses: list[int], like: Tensor, first: int, end: int, /) -> None:
        """Makes launches again."""
        run(self._sequence, [self._status, *addresses], like, first, end)
