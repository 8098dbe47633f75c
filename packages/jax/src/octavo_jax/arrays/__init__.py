"""Arrays and their axes: grouped tensors, group sizes, contracting axes, varying manual axes."""
