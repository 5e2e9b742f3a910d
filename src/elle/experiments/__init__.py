"""Recipes and what becomes of their runs: sweeps, reports, figures, tuning; all of it starts without torch."""
