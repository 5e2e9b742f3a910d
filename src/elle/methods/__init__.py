"""Training methods: the rows of METHODS, and a row with the options of a run."""

from elle.methods.options import configured
from elle.methods.rows import METHODS, Cost, Method, find_method

__all__ = ["METHODS", "Cost", "Method", "configured", "find_method"]
