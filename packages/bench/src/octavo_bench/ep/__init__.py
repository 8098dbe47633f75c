"""`octavo bench ep`: a MoE block in JAX, on one device and with its experts spread over several."""
