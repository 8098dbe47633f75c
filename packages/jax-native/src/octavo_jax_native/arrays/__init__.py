"""Planes of quantized operands as arrays of a custom call."""
