"""Settings of hypothesis: no deadline, because a machine that others share may pause any example."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("octavo", deadline=None)
settings.load_profile("octavo")
