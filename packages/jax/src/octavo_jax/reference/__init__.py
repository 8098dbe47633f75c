"""The backend "jax-reference": every recipe in plain jnp, jit-able, exact to the bit, on any device that XLA serves.

Nothing here relies on how a device treats subnormals, converts to eight-bit floats or divides: XLA:CPU flushes
subnormal inputs and results to zero, its float8 conversions do not saturate, and XLA:GPU may divide approximately.
So values travel as uint32 bit patterns, and only operations that every device rounds alike touch floats:
products and sums of normal numbers whose result is normal, and integer to float conversion.
"""
