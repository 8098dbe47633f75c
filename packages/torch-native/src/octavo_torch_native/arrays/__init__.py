"""From tensors to addresses: row plans, strides, streams, workspaces."""
