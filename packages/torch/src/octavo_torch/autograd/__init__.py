"""What the autograd functions of layers, MLPs and MoE layers share: saved operands, and gradients of their inputs."""
