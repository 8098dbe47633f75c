"""Octavo inside other libraries' models: `transformers`, `torchtitan`, `megatron` and `automodel`.

Each module names the version that it was written for; importing this package imports none of these libraries.
"""
