"""The bound functions of "quantize" and "dequantize" requests."""
