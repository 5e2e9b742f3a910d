"""The mathematics: torch only, and no file here imports another."""
