"""`octavo_registry.prefer`, mirrored into a JAX user context: a jitted function is traced again under another
preference, and does not run what an earlier one chose.

A new context is part of every later key of JAX's caches. So `octavo_jax` creates it when it is imported, if JAX is
imported by then: created at the first use of a layer, which is inside the first trace, it would have the first step of
every training run traced and compiled twice.
"""

from __future__ import annotations

import jax

import octavo_registry

PREFERENCE = jax.make_user_context(default_value=None)  # type: ignore[no-untyped-call]
octavo_registry.mirror_preference(PREFERENCE)
