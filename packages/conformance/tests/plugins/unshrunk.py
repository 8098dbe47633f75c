"""A pytest plugin: hypothesis reports the first example that fails and seeks no smaller one, which takes seconds."""

from __future__ import annotations

import hypothesis

_PHASES = (hypothesis.Phase.explicit, hypothesis.Phase.reuse, hypothesis.Phase.generate)

hypothesis.settings.register_profile("unshrunk", phases=_PHASES)
hypothesis.settings.load_profile("unshrunk")
