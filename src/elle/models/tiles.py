"""Sizes of what a kernel computes with at once."""


def padded(count: int, least: int = 1) -> int:
    """The next power of 2, and so many at least."""
    return max(least, 1 << (count - 1).bit_length())
