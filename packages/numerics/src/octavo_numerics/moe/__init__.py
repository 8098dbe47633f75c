"""What a MoE layer adds to its products: its router, its experts' activations, and rows that are kept as codes."""
