"""XLA custom calls: their targets, operands and static attributes."""
