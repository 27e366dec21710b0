"""The words the JSON schemas of these tests are written in."""

from __future__ import annotations

from dpofit.memory.program import PHASES

INTEGER, NUMBER, TEXT = {"type": "integer"}, {"type": "number"}, {"type": "string"}
MAYBE_INTEGER = {"type": ["integer", "null"]}
VERDICT = {"enum": ["fits", "tight", "oom"]}
MAYBE_VERDICT = {"enum": ["fits", "tight", "oom", None]}


def fields(**properties: object) -> dict:
    """An object with all of these."""
    return {"type": "object", "properties": properties, "required": list(properties)}


PREDICT = fields(
    schema={"const": "dpofit.predict/1"},
    verdict=VERDICT,
    verdict_by=fields(gpu=VERDICT, host=MAYBE_VERDICT, disk=MAYBE_VERDICT),
    gpu=fields(
        capacity_bytes=INTEGER, peak_bytes=INTEGER, low_bytes=INTEGER, high_bytes=INTEGER, allocated_bytes=INTEGER,
        reserved_bytes=INTEGER, reserved_without_expandable_bytes=INTEGER, retries_per_step=NUMBER,
        context_bytes=INTEGER, peak_phase={"enum": list(PHASES)},
        phases={"additionalProperties": fields(allocated_bytes=INTEGER, reserved_bytes=MAYBE_INTEGER),
                "propertyNames": {"enum": list(PHASES)}},
        breakdown_at_peak={"additionalProperties": INTEGER},
    ),
    host=fields(capacity_bytes=MAYBE_INTEGER, peak_bytes=INTEGER, low_bytes=INTEGER, high_bytes=INTEGER,
                peak_phase=TEXT, pinned_bytes=INTEGER, breakdown_at_peak={"additionalProperties": INTEGER}),
    disk=fields(capacity_bytes=MAYBE_INTEGER, checkpoint_bytes=INTEGER, total_bytes=INTEGER),
    job=fields(model=TEXT, method=TEXT, finetuning=TEXT, world_size=INTEGER, rows=INTEGER, tokens_per_row=INTEGER),
    stack=fields(llamafactory=TEXT, transformers=TEXT, torch=TEXT, deepspeed=TEXT),
    notes={"type": "array", "items": fields(id=TEXT, text=TEXT)},
)  # fmt: skip
