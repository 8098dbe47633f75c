"""Planes of quantized operands, and the other arrays and numbers of a custom call."""
