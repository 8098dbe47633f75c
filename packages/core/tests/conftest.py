"""Settings of hypothesis: no limit of time, because a machine that others share may pause any example."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("octavo", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("octavo")
