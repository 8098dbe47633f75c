"""The MLP: normalization, fc1, activation, fc2 as one differentiable function."""
