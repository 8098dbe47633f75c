"""Plans of the registry for one layer, and how long they are remembered."""
