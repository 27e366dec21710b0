"""`dpofit limits --reproduce` as a person meets it."""

from __future__ import annotations

import jsonschema

INTEGER = {"type": "integer"}
PRESET_2, PRESET_3 = (
    "qwen2.5-72b-dpo/full-z3-liger-unsloth-gc.v1",
    "qwen2.5-72b-dpo/full-z3-offload-liger-unsloth-gc.v1",
)
CLUSTER = {
    "type": "object",
    "required": ["gpu", "gpus", "finetuning", "unit", "fits"],
    "properties": {
        "gpu": {"enum": ["a100-80g", "h20-96g", "h200-141g"]},
        "gpus": {"type": "integer", "minimum": 8, "maximum": 256},
        "finetuning": {"enum": ["full", "lora"]},
        "unit": {"enum": ["tokens", "characters"]},
        "characters_per_token": {"type": ["number", "null"]},
        "fits": {"type": "array", "items": {"enum": [PRESET_2, PRESET_3]}},
        "outcomes": {"additionalProperties": {"enum": ["could", "too-long", "room-left"]}},
        "host_bytes_per_node": INTEGER,
    },
}


def test_clusters_stand_beside_the_rows_in_json(dpofit):
    ran = dpofit("limits", PRESET_2, PRESET_3, "--reproduce", "--json")
    assert ran.json["schema"] == "dpofit.limits/1"
    assert [row["recipe"] for row in ran.json["rows"]] == [PRESET_2, PRESET_3]
    jsonschema.validate(ran.json["clusters"], {"type": "array", "minItems": 2 * 3 * 3 * 8, "items": CLUSTER})
    for cluster in ran.json["clusters"]:
        assert cluster["fits"] == [name for name, outcome in cluster["outcomes"].items() if outcome == "could"]
        assert cluster["all_at_once"] == (len(cluster["fits"]) == 2)


def test_the_table_keeps_to_100_columns(dpofit):
    ran = dpofit("limits", PRESET_3, "--reproduce")
    assert max(map(len, ran.out.splitlines())) <= 100
    assert "characters, Chinese" in ran.out


def test_recipes_without_a_documented_limit_are_refused(dpofit):
    ran = dpofit("limits", "qwen2.5-7b-dpo/full-z3", "--reproduce")
    assert ran.exit_code == 2
    assert "none of the recipes has a documented limit" in ran.err


def test_a_whole_family_is_reproduced_by_its_documented_recipes(dpofit):
    """Among its others is qlora-ddp, which can't be fully fine-tuned."""
    ran = dpofit("limits", "qwen2.5-72b-dpo/qlora-ddp", PRESET_3, "--reproduce", "--json")
    assert [row["recipe"] for row in ran.json["rows"]] == ["qwen2.5-72b-dpo/qlora-ddp.v1", PRESET_3]
    assert {name for cluster in ran.json["clusters"] for name in cluster["outcomes"]} == {PRESET_3}
