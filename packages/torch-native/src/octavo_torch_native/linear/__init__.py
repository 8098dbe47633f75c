"""A whole linear layer as one recorded sequence of launches."""
