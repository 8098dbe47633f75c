"""The reference backend: every recipe in plain torch operations, for any device, checked bit for bit.

Nothing here reads a device tensor back, and every shape follows from static bounds.
"""
