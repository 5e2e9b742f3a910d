"""A training run, and what is done with one: read back, evaluated, looked at, timed."""
