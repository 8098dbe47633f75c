"""What the autograd functions of layers, MLPs and MoE layers share: saved operands, gradients of inputs, transforms."""
