"""The grouped MLP: fc1, activation, fc2 as one differentiable function, and its modules."""
