"""predict, limits and compare as a person meets them."""

from __future__ import annotations

import json

import jsonschema
import pytest

from tests.cli.schema import INTEGER, MAYBE_INTEGER, NUMBER, PREDICT, TEXT, VERDICT, fields

LIMIT = fields(
    recipe=TEXT, longest_prompt_tokens=MAYBE_INTEGER, response_tokens=INTEGER, cutoff_len=MAYBE_INTEGER,
    binding={"enum": ["gpu", "host", "disk", "none"]},
    documented={"anyOf": [{"type": "null"}, fields(prompt_tokens=INTEGER, source=TEXT)]},
)  # fmt: skip
LIMITS = fields(schema={"const": "dpofit.limits/1"}, rows={"type": "array", "items": LIMIT, "minItems": 1})
COMPARE = fields(
    schema={"const": "dpofit.compare/1"},
    rows={"type": "array", "items": fields(recipe=TEXT, verdict=VERDICT, limit=LIMIT, time=fields(gpu_hours=NUMBER))},
)

MINE = """\
model_name_or_path: Qwen/Qwen2.5-7B-Instruct
stage: dpo
do_train: true
finetuning_type: lora
lora_target: all
dataset: dpo_en_demo
template: qwen
cutoff_len: 2048
per_device_train_batch_size: 1
output_dir: saves/mine
bf16: true
"""


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "a folder" / "my run.yaml"
    path.parent.mkdir()
    path.write_text(MINE, encoding="utf-8")
    return path


def test_a_recipe_of_ones_own_with_spaces_in_its_path(dpofit, mine):
    ran = dpofit("predict", mine, "--gpu", "rtx4090", "--gpus-per-node", 1, "--json")
    jsonschema.validate(ran.json, PREDICT)
    assert ran.json["job"]["rows"] == 2 and ran.json["job"]["tokens_per_row"] == 2048


def test_overrides_follow_the_recipe(dpofit, mine):
    ran = dpofit("predict", mine, "per_device_train_batch_size=3", "cutoff_len=1000", "--json")
    assert ran.json["job"]["rows"] == 6 and ran.json["job"]["tokens_per_row"] == 1000


def test_lengths_on_the_command_line_win_over_cutoff_len_with_a_note(dpofit, mine):
    ran = dpofit("predict", mine, "--prompt", 4096, "--response", 512, "--json")
    assert ran.json["job"]["tokens_per_row"] == 4608
    assert "cutoff-truncates" in {note["id"] for note in ran.json["notes"]}


def test_a_file_of_real_lengths_sets_the_longest_row(dpofit, mine, tmp_path):
    lengths = tmp_path / "lengths.jsonl"
    rows = [
        {"prompt": 100, "chosen": 50, "rejected": 60, "count": 999},
        {"prompt": 1500, "chosen": 10, "rejected": 404},
    ]
    lengths.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    ran = dpofit("predict", mine, "--lengths", lengths, "--json")
    assert ran.json["job"]["tokens_per_row"] == 1904
    assert "mix-assumed" not in {note["id"] for note in ran.json["notes"]}


def test_a_few_pairs_that_set_the_peak_for_all_are_named_with_what_they_cost(dpofit, mine, tmp_path):
    few = [{"prompt": 6000, "chosen": 10, "rejected": 2000, "count": 2}, {"prompt": 7000, "chosen": 9, "rejected": 8}]
    rest = [{"prompt": 800, "chosen": 50, "rejected": 60, "count": 9_000}, {"prompt": 900, "chosen": 90, "rejected": 9}]
    peaks = []
    for name, rows in (("all", [*rest, *few]), ("rest", rest)):
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        ran = dpofit("predict", mine, "--lengths", tmp_path / name, "--json")
        peaks.append(ran.json["gpu"]["peak_bytes"])
        said = [note["text"] for note in ran.json["notes"] if note["id"] == "length-outliers"]
        if name == "all":
            [text] = said
    assert said == []  # its longest row is 1.15 times the others
    assert text.startswith(f"3 of 9,004 pairs need {peaks[0] / peaks[1]:.1f}x the memory of the rest: ")
    assert f"a GPU peaks at {peaks[1] / 2**30:.1f} GiB" in text


def test_an_unknown_host_is_noted_not_guessed(dpofit, mine):
    ran = dpofit("predict", mine, "--json")
    assert ran.json["verdict_by"]["host"] is None
    assert "host-not-checked" in {note["id"] for note in ran.json["notes"]}


def test_oom_is_exit_code_1(dpofit, mine):
    assert dpofit("predict", mine, "--gpu", "8GiB").exit_code == 1


@pytest.mark.parametrize("command", ["predict", "limits", "compare", "advise"])
def test_a_card_that_cannot_run_the_recipe_is_refused_with_what_would(dpofit, mine, command):
    refused = dpofit(command, mine, "flash_attn=fa2", "--gpu", "t4-16g", "--gpus-per-node", 1)
    assert refused.exit_code == 2
    for said in ("t4-16g has no bf16", "Set fp16: true and bf16: false", "Set flash_attn: sdpa"):
        assert said in refused.err


def test_the_same_in_fp16_is_predicted(dpofit, mine):
    half = ["fp16=true", "bf16=false", "cutoff_len=256"]
    ran = dpofit("predict", mine, *half, "--gpu", "t4-16g", "--gpus-per-node", 1, "--json")
    assert ran.json["verdict"] in ("tight", "oom")  # a base of 15.2e9 bytes on a card of 14.56 GiB


def test_all_mistakes_come_at_once_with_a_remedy_each_and_exit_code_2(dpofit, mine):
    mine.write_text(MINE + "pref_los: sigmoid\nlora_rank: many\n", encoding="utf-8")
    ran = dpofit("predict", mine, "--gpu", "a100", "--nodes", 0, "--prompt", 0)
    assert ran.exit_code == 2 and ran.out == ""
    for said in ("pref_los", "pref_loss", "lora_rank", "--gpu", "a100-80g", "--nodes", "--prompt"):
        assert said in ran.err
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["predict"], "RECIPE"),
        (["predict", "no-such-recipe"], "no-such-recipe"),
        (["predict", "full-z2", "--stack", "newest"], "pinned, 2024"),
        (["predict", "full-z2", "--lengths", "/no/such/file"], "/no/such/file"),
        (["predict", "full-z2", "stage=pt"], "stage"),
        (["limits", "full-z2", "full-zz"], "full-zz"),
    ],
)
def test_bad_input_is_exit_code_2_without_a_traceback(dpofit, arguments, said):
    ran = dpofit(*arguments)
    assert ran.exit_code == 2
    assert said in ran.err and "Traceback" not in ran.err


HUGE = "9" * 400  # more than a float holds


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpu", f"{HUGE}GiB"], "--gpu"),
        (["--host-ram", f"{HUGE}GiB"], "--host-ram"),
        (["--disk", f"{HUGE}GiB"], "--disk"),
        (["--gpus-per-node", 10**9], "--gpus-per-node"),
        (["--nodes", HUGE], "--nodes"),
        (["--prompt", HUGE], "cutoff_len"),
        ([f"cutoff_len={10**12}"], "cutoff_len"),
        ([f"per_device_train_batch_size={10**9}"], "per_device_train_batch_size"),
        ([f"lora_rank={10**9}", "finetuning_type=lora"], "lora_rank"),
        ([f"lora_dropout={HUGE}"], "lora_dropout"),
        ([f"deepspeed={{zero_optimization: {{stage: 2, reduce_bucket_size: {HUGE}}}}}"], "reduce_bucket_size"),
        ([f"{'x' * 5000}=1"], "is not a key"),
        ([f"model_name_or_path={'x' * 5000}"], "model_name_or_path"),
        (["--plot", f"{'x' * 5000}.png"], "--plot"),
        (["--timeline", "/no/such/folder/step.html"], "--timeline"),
    ],
)
def test_absurd_values_are_bad_input_without_a_traceback(dpofit, mine, arguments, said):
    ran = dpofit("predict", mine, *arguments)
    assert ran.exit_code == 2
    assert said in ran.err and "Traceback" not in ran.err


@pytest.mark.parametrize("command", ["show", "check", "predict", "limits", "compare", "advise"])
def test_a_name_no_file_system_takes_is_bad_input(dpofit, command):
    assert dpofit(command, "x" * 5000).exit_code == 2


def test_an_enormous_job_is_out_of_memory_like_any_other(dpofit, mine):
    ran = dpofit("predict", mine, "flash_attn=disabled", "--prompt", 9_000_000, "per_device_train_batch_size=1000")
    assert ran.exit_code == 1 and "oom" in ran.out


def test_rows_of_two_tokens_are_padded_to_eight(dpofit, mine):
    ran = dpofit("predict", mine, "--prompt", 1, "--response", 1, "--json")
    assert ran.json["job"]["tokens_per_row"] == 8


def test_answers_longer_than_the_model_leave_no_prompt(dpofit, mine):
    ran = dpofit("limits", mine, "--response", 2_000_000)
    assert ran.exit_code == 1 and "nothing" in ran.out


@pytest.mark.parametrize("line", ["[" * 100_000, '{"prompt": 1e999, "chosen": 1, "rejected": 1}'], ids=["deep", "inf"])
def test_a_line_that_is_no_pair_is_named(dpofit, mine, tmp_path, line):
    (tmp_path / "lengths.jsonl").write_text(line, encoding="utf-8")
    ran = dpofit("predict", mine, "--lengths", tmp_path / "lengths.jsonl")
    assert ran.exit_code == 2 and "lengths.jsonl:1" in ran.err


def test_limits_of_a_family_follow_the_contract(dpofit):
    ran = dpofit("limits", "qwen2.5-7b-dpo", "--json")
    jsonschema.validate(ran.json, LIMITS)
    for row in ran.json["rows"]:
        assert row["cutoff_len"] == row["longest_prompt_tokens"] + row["response_tokens"]
        assert row["longest_prompt_tokens"] % 8 == 0


def test_limits_show_the_documented_ones_beside(dpofit):
    rows = dpofit("limits", "qwen2.5-72b-dpo/full-z3", "--json").json["rows"]
    assert rows[0]["documented"]["prompt_tokens"] == 8192


def test_where_nothing_fits_limits_say_so_with_exit_code_1(dpofit):
    ran = dpofit("limits", "qwen2.5-72b-dpo/full-z3", "--gpu", "a100-80g", "--nodes", 1, "--json")
    assert ran.exit_code == 1
    assert ran.json["rows"][0]["longest_prompt_tokens"] is None


def test_compare_follows_the_contract_and_starts_at_one(dpofit):
    ran = dpofit("compare", "qwen2.5-7b-dpo", "--json")
    jsonschema.validate(ran.json, COMPARE)
    assert ran.json["rows"][0]["time"]["relative_seconds_per_pair"] == 1.0


TABLES = [
    ["predict", "qwen2.5-72b-dpo/full-z3", "--explain"],
    ["limits", "qwen2.5-7b-dpo"],
    ["compare", "qwen2.5-7b-dpo"],
]


@pytest.mark.parametrize("arguments", TABLES)
def test_tables_fit_100_columns(dpofit, arguments):
    lines = dpofit(*arguments).out.splitlines()
    assert len(lines) > 5
    assert max(map(len, lines)) <= 100


def test_explain_shows_the_sum_behind_the_logits_and_the_checkpoints(dpofit):
    out = " ".join(dpofit("predict", "qwen2.5-72b-dpo/full-z3", "--explain").out.split())
    assert "5.00 x one fp32 [2 rows x 9,216 tokens x 152,064 x 4 B = 10.4 GiB]" in out
    assert "80 layers x 2 rows x 9,216 tokens x 8,192 x 2 B" in out
    assert "72,706,203,648 trained / 32 ranks x (4 B master + 8 B moments)" in out


def test_a_plot_is_written_once_and_overwritten_only_with_force(dpofit, mine, tmp_path):
    picture = tmp_path / "memory.png"
    assert dpofit("predict", mine, "--plot", picture).exit_code == 0
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    picture.write_bytes(b"mine")
    refused = dpofit("predict", mine, "--plot", picture)
    assert refused.exit_code == 2 and "--force" in refused.err
    assert picture.read_bytes() == b"mine"
    assert dpofit("predict", mine, "--plot", picture, "--force").exit_code == 0


def test_compare_plots_memory_against_length(dpofit, tmp_path):
    picture = tmp_path / "lengths.svg"
    assert dpofit("compare", "full-z2", "lora-ddp", "--plot", picture).exit_code == 0
    assert "documented" not in picture.read_text(encoding="utf-8")
    assert "<svg" in picture.read_text(encoding="utf-8")


def test_planning_imports_nothing_heavy(python):
    code = (
        "import sys; from dpofit.cli.app import main\n"
        "try: main(['predict', 'qwen2.5-72b-dpo/full-z3', '--json'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'transformers', 'datasets', 'matplotlib', 'numpy') if m in sys.modules])"
    )
    assert python(code).out.strip().splitlines()[-1] == "[]"


def test_help_has_examples(dpofit):
    for name in ("predict", "limits", "compare"):
        assert f"dpofit {name} " in dpofit(name, "--help").out
