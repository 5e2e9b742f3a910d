"""Trained networks for other programs: files of several formats, each checked, each with a model card."""
