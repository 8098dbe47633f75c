"""From tensors to octavo_native's calls: group indices, addresses, strides, streams, workspaces."""
