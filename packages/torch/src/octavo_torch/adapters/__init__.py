"""Octavo inside other libraries' models: `transformers`, `torchtitan`, `megatron` and `automodel`.

Each module says for which version it was written; importing this package imports none of these libraries.
"""
