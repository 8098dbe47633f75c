"""What a card declares, and what tests ask of it: the capability a test needs, the variants it is tried on, targets."""
