"""The summary of the grid: counts within the bounds, the worst by name, and everything beyond."""

from agreement_report import agreement_of, section, sentence

_POINT = {
    "model": "m", "stage": "dpo", "finetuning": "full", "zero": "z3", "pref_loss": "sigmoid", "pure_bf16": False,
    "checkpointing": "reentrant", "liger": False, "attention": "sdpa", "padded": True, "pairs": 1, "tokens": 2048,
    "optim": "adamw_torch_fused", "recipe": [],
}  # fmt: skip


def _point(predicted, **changed):
    traced = {"forward": 1000, "backward": 2000}
    row = {"point": _POINT | changed, "predicted_bytes": predicted, "traced_bytes": traced, "commit": "abc"}
    return agreement_of(row)


EQUAL = _point({"forward": 1000, "backward": 2000})
PHASE_OFF = _point({"forward": 1030, "backward": 2000}, liger=True)
PEAK_OFF = _point({"forward": 2100, "backward": 2000}, zero="z2", recipe=[["gradient_accumulation", 2]])


def test_counts_are_of_points_within_one_and_two_percent():
    assert "a grid of 3 jobs" in sentence([EQUAL, PHASE_OFF, PEAK_OFF])
    assert "within 1 % at 2, every phase within 2 % at 1, the same winning phase at 2;" in sentence(
        [EQUAL, PHASE_OFF, PEAK_OFF]
    )


def test_each_group_has_its_counts_and_its_worst():
    table = section([EQUAL, PHASE_OFF, PEAK_OFF])
    assert "| dpo full, z3 | 2 | 2 | 1 | 2 | +0.00% | forward +3.00% |" in table
    assert "Run at abc (3)." in table
    assert "| dpo full, z2 | 1 | 0 | 0 | 0 | +5.00% | forward +110.00% |" in table


def test_points_beyond_a_bound_are_named_worst_first():
    named = section([EQUAL, PHASE_OFF, PEAK_OFF]).partition("Beyond a bound:\n\n")[2].splitlines()
    assert named == [
        "- m dpo full zero=z2 gradient_accumulation=2: peak +5.00%, forward +110.00%",
        "- m dpo full zero=z3 liger=True: peak +0.00%, forward +3.00%",
    ]
    assert section([EQUAL]).endswith("None is beyond a bound.")
