"""The definition of every recipe in plain torch operations, for any device, checked bit for bit."""
