"""`python -m octavo_registry` is the `octavo` command."""

from octavo_registry.cli import main

if __name__ == "__main__":
    main()
