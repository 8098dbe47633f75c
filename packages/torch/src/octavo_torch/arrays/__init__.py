"""Arrays and their checks: grouped tensors, group sizes, per-group parameters, strides, dtypes."""
