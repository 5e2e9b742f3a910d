"""Settings out of TOML files and `key=value` words, which mean the same."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elle.config.keys import KEYS, TEXT_KEYS, Config, parse_config
from elle.errors import InputError, nearest


def parse_words(words: Sequence[str]) -> dict[str, Any]:
    """`key=value` words of the command line as the values a TOML file would give."""
    values: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise InputError(f"{word!r} is not key=value, for example method=elle-a")
        if not text:
            raise InputError(f"{word!r} has no value; write one, or leave the word out")
        place = values
        *folders, name = key.split(".")
        if (folders or [name])[0] not in KEYS or (folders and folders[0] != "method"):
            raise InputError(f"unknown key {key!r}{nearest(key, KEYS)}; `elle train --help` lists the keys")
        if key == "method" and isinstance(values.get("method"), dict):
            place, name = values["method"], "name"
        for folder in folders:
            below = place.setdefault(folder, {})
            if not isinstance(below, dict):
                below = place[folder] = {"name": below}
            place = below
        place[name] = text if key in TEXT_KEYS else _value(text)
    return values


def _value(text: str) -> Any:
    """A number, a boolean, or the text itself."""
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def load_config(words: Sequence[str], file: Path | None = None) -> Config:
    """The configuration of a TOML file, overridden by `key=value` words; unresolved."""
    values: dict[str, Any] = {}
    if file is not None:
        values = read_toml(file)
        if any(key.startswith("method.") for key in values):  # a method's own fields, written as recipes write them
            values = nested(dotted(values))
        parse_config(values, where=f"{file}: ")
    words_values = parse_words(words)
    if "method" in words_values and "method" in values:
        words_values["method"] = _merged(_table(values["method"]), _table(words_values["method"]))
    if "phases" in words_values:  # which say how many epochs and of what batch, instead of the file's
        values = {key: value for key, value in values.items() if key not in ("epochs", "batch")}
    return parse_config(values | words_values)


def run_config(directory: Path) -> Config:
    """The settings of a run directory; InputError where it is none."""
    if not directory.is_dir():
        what = "is not a folder" if directory.exists() else "does not exist"
        raise InputError(f"{directory} {what}; give the run directory that `elle train` wrote")
    file = directory / "config.toml"
    if not file.is_file():
        below = min(directory.glob("*/config.toml"), default=None)
        hint = f"give a run in it, such as {below.parent}" if below else "`elle train` writes one"
        raise InputError(f"{directory} is not a run directory: it has no config.toml; {hint}")
    return load_config([], file)


def dotted(table: Mapping[str, Any]) -> dict[str, Any]:
    """A method's own fields by their dotted names, which TOML reads as tables in tables where they have no quotes.

    As a table, a method that another place names would take their place, and they would be lost without a word.
    """
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if (key == "method" or key.startswith("method.")) and isinstance(value, Mapping):
            flat |= dotted({"method" if name == "name" else f"{key}.{name}": own for name, own in value.items()})
        else:
            flat[key] = value
    return flat


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """`{"method": "gradalign", "method.loss.weight": 1}` as the tables that `parse_config` reads."""
    plain = {key: value for key, value in values.items() if not key.startswith("method.")}
    fields = {key: value for key, value in values.items() if key.startswith("method.")}
    if fields:
        table: dict[str, Any] = {"name": plain["method"]} if "method" in plain else {}
        for key, value in fields.items():
            part, _, name = key.removeprefix("method.").partition(".")
            table[part] = {**table.get(part, {}), name: value}
        plain["method"] = table
    return plain


def _table(method: Any) -> dict[str, Any]:
    return method if isinstance(method, dict) else {"name": method}


def _merged(file: dict[str, Any], words: dict[str, Any]) -> dict[str, Any]:
    """The file's method with the words' fields; another method takes none of the file's."""
    if words.get("name", file.get("name")) != file.get("name"):
        return words
    both = [part for part in words if isinstance(words[part], dict) and isinstance(file.get(part), dict)]
    return file | words | {part: file[part] | words[part] for part in both}


def read_toml(file: Path) -> dict[str, Any]:
    """The values of a TOML file."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{file} does not exist") from None
    except OSError as problem:
        raise InputError(f"{file} is not a readable TOML file: {problem.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise InputError(f"{file} is not a readable TOML file: {problem}") from None
