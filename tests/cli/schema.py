"""The words the JSON schemas of these tests are written in."""

from __future__ import annotations

INTEGER, NUMBER, TEXT = {"type": "integer"}, {"type": "number"}, {"type": "string"}
MAYBE_INTEGER = {"type": ["integer", "null"]}
VERDICT = {"enum": ["fits", "tight", "oom"]}
MAYBE_VERDICT = {"enum": ["fits", "tight", "oom", None]}


def fields(**properties: object) -> dict:
    """An object with all of these."""
    return {"type": "object", "properties": properties, "required": list(properties)}
