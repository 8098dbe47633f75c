"""Octavo inside other libraries' models: `transformers`, `peft`, `torchtitan`, `megatron` and `automodel`.

`frozen` puts codes in the place of a transformers model's experts, for adapters beside them; `megatron_moe` and
`megatron_checkpoint` are Megatron-LM's whole MoE layer and its distributed checkpoints.

Each module names the version that it was written for; importing this package imports none of these libraries.
"""
