"""A MoE layer from tokens to combined tokens as one differentiable call, and the forms of what it keeps."""
