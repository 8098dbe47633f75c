"""From tensors to launches of Triton's kernels: stored dtypes, streams, the table of ragged rows."""
