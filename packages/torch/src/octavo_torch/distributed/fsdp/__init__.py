"""FSDP2 that gathers quantized codes."""
