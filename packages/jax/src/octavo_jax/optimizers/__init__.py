"""AdamW as an optax transformation, with the bits of `octavo_numerics.adamw_step`. Needs the extra `octavo-jax[optax]`.

It keeps fp32 or bf16 masters, and moments in fp32 or in 8-bit blocks, and works under jit, over sharded arrays and
with learning rates that are schedules or arrays.
"""

from octavo_jax.optimizers.adamw import AdamW, AdamWState, adamw
from octavo_jax.optimizers.block_state import BlockState

__all__ = ["AdamW", "AdamWState", "BlockState", "adamw"]
