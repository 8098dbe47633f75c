"""Plans of the registry, made at trace time."""
