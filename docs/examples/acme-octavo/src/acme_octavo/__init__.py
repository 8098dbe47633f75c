"""The backend "acme" for Octavo."""

__version__ = "0.1.0"
