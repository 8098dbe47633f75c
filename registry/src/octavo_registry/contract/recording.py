"""The launches of a pass, written down while it runs and made again on other arrays, without the Python around them."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Protocol

from octavo_registry.contract.arrays import A_contra


class Recorder(Protocol[A_contra]):
    """Writes down what its backend launches in this thread inside of a `with`: in addition, for the launches are made.

    Arrays have the numbers 0, 1 and so on, in the order in which `name` is told of them.

    refusal   why the launches cannot be made again, or None: one of them reads an array that has no number, or is of a
              kind that nobody writes down
    """

    @property
    def refusal(self) -> str | None: ...

    def __enter__(self) -> Any: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

    def name(self, start: int, size: int, replaces: bool, /) -> None:
        """Gives the next number to the array of `size` bytes at this address, for the launches that follow.

        replaces   earlier arrays that share bytes with it were freed. If it is False, such arrays are a ValueError
        """

    def arrays(self) -> list[list[int]]:
        """The numbers of the arrays that each launch reads or writes, in the order of the launches."""

    def run(self, addresses: list[int], like: A_contra, first: int, end: int, /) -> None:
        """Makes the launches from number `first` to before `end` on the arrays at these addresses, by their numbers.

        like   an array of theirs, on whose device and current stream the launches are made
        """


class MakeRecorder(Protocol[A_contra]):
    """Makes a recorder for a pass on the device of `like`."""

    def __call__(self, like: A_contra, /) -> Recorder[A_contra]: ...
