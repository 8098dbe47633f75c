"""Every class of recipe, and hypothesis's draws of their fields and of recipes of any class."""

from __future__ import annotations

from hypothesis import strategies as st

from octavo import MXFP8, NVFP4, BlockScaling, CurrentScaling, DelayedScaling, HighPrecision, MXFP4Weights, RowScaling
from octavo.recipe_base import GEMMS

ALL = [HighPrecision, DelayedScaling, CurrentScaling, RowScaling, BlockScaling, MXFP4Weights, MXFP8, NVFP4]
QUANTIZED = ALL[1:]

slots = st.sampled_from(["quantized", "high_precision"])
formats = st.sampled_from(["e4m3", "e5m2"])
epsilons = st.floats(min_value=0, max_value=1e30)
common = {"fprop": slots, "dgrad": slots, "wgrad": slots}
fp8 = {
    **common,
    "forward_format": formats,
    "gradient_format": formats,
    "fast_accumulation": st.frozensets(st.sampled_from(GEMMS)),
}
scaled = {**fp8, "power_of_two": st.booleans(), "amax_epsilon": epsilons}
rounded = {name: fp8[name] for name in ("dgrad", "wgrad", "gradient_format", "fast_accumulation")}
recipes = st.one_of(
    st.builds(HighPrecision, output_dtype=st.sampled_from([None, "float32"])),
    st.builds(DelayedScaling, **fp8, history=st.integers(2, 4096), margin=st.integers(-8, 8)),
    st.builds(CurrentScaling, **scaled),
    st.builds(RowScaling, **scaled),
    st.builds(BlockScaling, **scaled),
    st.builds(MXFP8, **fp8, square_weights=st.booleans()),
    st.builds(MXFP8, **fp8, products=st.sampled_from(["exact", "folded"])),
    st.builds(MXFP4Weights, **rounded),
    st.builds(
        NVFP4, **common, square_weights=st.booleans(), stochastic_gradients=st.booleans(), hadamard=st.booleans()
    ),
)
