"""What the linen and the nnx modules share. Imports no Flax, so that the two packages stay apart."""
