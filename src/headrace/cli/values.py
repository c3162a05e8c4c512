"""Reads the values of options, and refuses what cannot be one, before anything heavy is imported. Pure."""

from __future__ import annotations

import json

import typer

from headrace.cli.foreign import FOREIGN_LOAD_FORMATS

LOAD_FORMATS = ("auto", "headrace", "runai_streamer", "safetensors", "modelopt", "dummy")
"""The values of `headrace.streaming.formats.LoadFormat`, whose package imports torch; a test holds the two together."""


def load_format(name: str) -> str:
    """Return the name of a load format."""
    if name in LOAD_FORMATS:
        return name
    known = f"Known: {', '.join(LOAD_FORMATS)}."
    if name in FOREIGN_LOAD_FORMATS:
        raise typer.BadParameter(f"{name} is known to vLLM/SGLang, not supported yet by Headrace. {known}")
    raise typer.BadParameter(f"{name!r} is not a load format. {known}")


def json_object(text: str) -> str:
    """Return the text of a JSON object, as it is."""
    try:
        parsed = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not JSON: {error}. Put it in single quotes.") from error
    if not isinstance(parsed, dict):
        raise typer.BadParameter(f"{text!r} is not a JSON object, such as '{{\"concurrency\": 16}}'.")
    return text


def without_keys(text: str | None, **given: object) -> str | None:
    """Return the JSON object in ``text`` without those keys that are ``given`` a value by an option of their own."""
    if text is None:
        return None
    return json.dumps({key: value for key, value in json.loads(text).items() if given.get(key) is None})
