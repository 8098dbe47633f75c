"""From entry points to plugins whose hooks may be called."""
