"""The `elle` command: a file for each group of subcommands, and what they print with."""

from elle.cli.command import app, main

__all__ = ["app", "main"]
