"""The bound functions of quantizers, alone and fused, and of dequantization."""
