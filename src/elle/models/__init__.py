"""Networks by name: images in [0, 1] in, logits out."""
