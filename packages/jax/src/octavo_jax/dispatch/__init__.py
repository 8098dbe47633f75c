"""Plans of the registry, which are chosen when a program is traced."""
