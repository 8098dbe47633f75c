"""Which product a chip multiplies the operands of a GEMM by, and in which tiles."""
