"""Octavo inside other libraries' models: `transformers`, `peft`, `torchtitan`, `megatron` and `automodel`.

`frozen` replaces the experts of a transformers model by codes, beside which adapters are trained; `megatron_moe` and
`megatron_checkpoint` serve Megatron-LM's whole MoE layer and its distributed checkpoints.

Each module names the version that it was written for; importing this package imports none of these libraries.
"""
