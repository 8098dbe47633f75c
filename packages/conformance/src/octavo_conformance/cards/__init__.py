"""What a card declares, as a test asks for it: the variants it is tried on, the capability it needs, the targets."""
