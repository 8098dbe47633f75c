"""The bound functions "quantize" and "dequantize", and column codes from one layout to the other."""
