"""What a test gives a backend: random inputs, group sizes, operands and recorded training steps."""
