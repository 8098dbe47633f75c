"""Forward and backward passes of one grouped linear layer in each framework."""
