"""The commands of Octavo that need several packages: `octavo train` and `octavo new`."""

__version__ = "0.2.0"
