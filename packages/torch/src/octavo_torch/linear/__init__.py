"""The grouped linear layer: function, module, autograd, quantized operands."""
