"""The conformance suite: what an Octavo backend must do, as tests that any backend can run.

`pytest --pyargs octavo_conformance.suite --octavo-backend NAME`, or `octavo conform NAME`.
"""

__version__ = "0.2.0"

SEED_KEY = "octavo_seed"
"""Key under which pytest-xdist's controller passes the seed to its workers."""


class UndeclaredCapability(UserWarning):
    """A backend does something right that its card does not declare, so that no request ever reaches it."""


__all__ = ["UndeclaredCapability"]
