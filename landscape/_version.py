"""The one place that holds the version; files and the package metadata read it here."""

__version__ = "0.35.0"
