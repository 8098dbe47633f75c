"""Layers over several ranks: tensor parallelism and FSDP."""
