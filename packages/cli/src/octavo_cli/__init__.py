"""The commands of Octavo that need several packages: `octavo train`, `inspect`, `compare`, `advise` and `new`."""

__version__ = "0.2.0"
