"""The mathematics: torch only, and no file or folder here imports another."""
