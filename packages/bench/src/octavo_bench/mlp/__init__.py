"""`octavo bench mlp`: expert MLPs in torch, fused and as operations in a row."""
