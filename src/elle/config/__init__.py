"""The settings of a run: every key once, read from TOML files and `key=value` words alike."""

from elle.config.keys import KEYS, OWN_IMAGES, Config, format_value, given, on_own_images, parse_config
from elle.config.radius import check_radius, format_radius, parse_radius, radius_option
from elle.config.reading import dotted, load_config, nested, parse_words, read_toml, run_config

__all__ = [
    "KEYS",
    "OWN_IMAGES",
    "Config",
    "check_radius",
    "dotted",
    "format_radius",
    "format_value",
    "given",
    "load_config",
    "nested",
    "on_own_images",
    "parse_config",
    "parse_radius",
    "parse_words",
    "radius_option",
    "read_toml",
    "run_config",
]
