"""LoRA: low-rank adapters beside the weights of grouped layers."""
