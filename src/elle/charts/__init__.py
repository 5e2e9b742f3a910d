"""SVG charts: values in, text out."""
