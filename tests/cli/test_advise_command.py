"""`dpofit advise` as a person meets it."""

from __future__ import annotations

import jsonschema
import pytest

from dpofit.recipe.long_context import PIECES
from tests.cli.schema import INTEGER, MAYBE_INTEGER, MAYBE_VERDICT, NUMBER, TEXT, VERDICT, fields

SPACES = {
    "gpu": fields(capacity_bytes=INTEGER, peak_bytes=INTEGER, high_bytes=INTEGER, allocated_bytes=INTEGER),
    "host": fields(capacity_bytes=MAYBE_INTEGER, peak_bytes=INTEGER, high_bytes=INTEGER, pinned_bytes=INTEGER),
    "disk": fields(capacity_bytes=MAYBE_INTEGER, total_bytes=INTEGER),
}
SUGGESTION = fields(
    kind={"enum": ["same", "cluster", "trains", "data", "method"]},
    changes={"type": "array", "minItems": 1, "items": fields(id=TEXT, title=TEXT, remark=TEXT)},
    arguments={"type": "array", "items": TEXT}, environment={"additionalProperties": TEXT},
    changes_method={"type": "boolean"}, verdict={"const": "fits"}, **SPACES,
    gpu_delta_bytes=INTEGER, host_delta_bytes=INTEGER, disk_delta_bytes=INTEGER,
    relative_time=NUMBER, relative_gpu_time=NUMBER,
)  # fmt: skip
ADVISE = fields(
    schema={"const": "dpofit.advise/1"}, recipe=TEXT, verdict=VERDICT,
    verdict_by=fields(gpu=VERDICT, host=MAYBE_VERDICT, disk=MAYBE_VERDICT), **SPACES,
    suggestions={"type": "array", "items": SUGGESTION},
    would_not_help={"type": "array", "items": fields(
        id=TEXT, change=TEXT, why=TEXT, gpu_saved_bytes=MAYBE_INTEGER, host_added_bytes=MAYBE_INTEGER)},
)  # fmt: skip

ASKED = [
    ["qwen2.5-72b-dpo/full-z3-unsloth-gc", "--gpu", "a100-80g", "--nodes", "16", "--host-ram", "1000GiB",
     "--prompt", "10240", "--response", "1024"],
    ["qwen2.5-7b-dpo/lora-1gpu", "cutoff_len=10000"],
    ["qwen2.5-72b-dpo/full-z3", "per_device_train_batch_size=2"],  # the cluster is the card's
]  # fmt: skip


@pytest.mark.parametrize("arguments", ASKED, ids=lambda arguments: arguments[0])
def test_a_suggestions_arguments_appended_to_predict_make_it_fit(dpofit, arguments):
    ran = dpofit("advise", *arguments, "--json")
    jsonschema.validate(ran.json, ADVISE)
    assert (ran.exit_code, ran.json["verdict"] != "fits") == (0, True)
    for suggestion in ran.json["suggestions"][:2]:
        predicted = dpofit("predict", *arguments, *suggestion["arguments"], "--json").json
        assert predicted["verdict"] == "fits"
        assert predicted["gpu"]["peak_bytes"] == suggestion["gpu"]["peak_bytes"]
        assert predicted["host"]["peak_bytes"] == suggestion["host"]["peak_bytes"]


def test_only_a_suggestion_of_another_method_says_so(dpofit):
    [*others, last] = dpofit("advise", *ASKED[1], "--json").json["suggestions"]
    assert (last["changes_method"], last["arguments"]) == (True, ["pref_loss=orpo"])
    assert not any(other["changes_method"] for other in others)


def test_a_job_that_fits_is_exit_0_without_suggestions(dpofit):
    ran = dpofit("advise", "qwen2.5-7b-dpo/lora-1gpu", "--json")
    jsonschema.validate(ran.json, ADVISE)
    assert (ran.exit_code, ran.json["verdict"], ran.json["suggestions"]) == (0, "fits", [])
    assert "Nothing needs to change" in dpofit("advise", "qwen2.5-7b-dpo/lora-1gpu").out


def test_when_nothing_helps_it_is_exit_1(dpofit):
    ran = dpofit("advise", "qwen2.5-72b-dpo/qlora-ddp", "pref_loss=orpo", "--gpu", "16GiB", "--gpus-per-node", 1,
                 "--nodes", 1)  # fmt: skip
    assert ran.exit_code == 1
    assert "No change dpofit knows makes it fit." in ran.out


def test_what_is_not_modelled_is_exit_2(dpofit):
    ran = dpofit("advise", "qwen2.5-7b-dpo/lora-1gpu", "stage=ppo")
    assert ran.exit_code == 2 and "Traceback" not in ran.err


def test_the_table_keeps_to_100_columns_and_says_what_would_not_help(dpofit):
    ran = dpofit("advise", *ASKED[1])
    assert max(map(len, ran.out.splitlines())) <= 100
    assert "Would not help here" in ran.out
    assert "LLaMA-Factory turns Liger's fused loss off for it" in " ".join(ran.out.split())


def test_help_has_examples(dpofit):
    assert "dpofit advise" in dpofit("advise", "--help").out.partition("Examples:")[2]


def test_long_prompts_are_answered_with_the_fewest_pieces_in_one_argument(dpofit) -> None:
    job = ("qwen2.5-72b-dpo/full-z3-liger", "--gpu", "a800-80g", "--nodes", "4", "--gpus-per-node", "8",
           "--host-ram", "1000GiB", "--prompt", "16384", "--response", "1024", "--json")  # fmt: skip
    suggested = dpofit("advise", *job).json["suggestions"][0]["arguments"]
    assert suggested == ["--long-context", "answer_logps,offload_checkpoints"]

    def verdict(pieces: str) -> str:
        return dpofit("predict", *job, "--long-context", pieces).json["verdict"]

    assert verdict("answer_logps,offload_checkpoints") == "fits"
    assert "fits" not in {verdict(piece) for piece in PIECES}
