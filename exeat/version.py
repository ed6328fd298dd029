"""The version, in one place: the build, the command and the log read it here."""

__version__ = "0.1.0"
