"""dpofit data, run as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .helpers import dpofit, pair, write_rows

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data folder and a recipe, in a path with a space."""
    folder = tmp_path / "my run"
    (folder / "data").mkdir(parents=True)
    rows = [pair(n) for n in range(60)]
    rows[5]["chosen"] = None
    write_rows(folder / "data" / "pairs.jsonl", rows)
    columns = {"prompt": "instruction", "chosen": "chosen", "rejected": "rejected"}
    entry = {"file_name": "pairs.jsonl", "ranking": True, "columns": columns}
    (folder / "data" / "dataset_info.json").write_text(json.dumps({"pairs": entry}))
    (folder / "run.yaml").write_text(
        "model_name_or_path: some/model\nstage: dpo\ndo_train: true\nfinetuning_type: full\ndataset: pairs\n"
        f"dataset_dir: {folder / 'data'}\ntemplate: qwen\ncutoff_len: 1024\noutput_dir: out\n"
    )
    return folder


def test_a_recipe_gives_its_data_set_template_and_cutoff(folder: Path):
    done = dpofit("data", folder / "run.yaml", "--json")
    document = json.loads(done.stdout)
    assert done.returncode == 0
    assert document["schema"] == "dpofit.data/1"
    assert (document["rows"], document["pairs"], document["lengths"]["cutoff_len"]) == (60, 59, 1024)
    missing = next(f for f in document["findings"] if f["id"] == "data.answer-missing")
    assert missing["evidence"] == [{"where": "pairs.jsonl:6", "text": "chosen is missing or null"}]
    assert missing["confidence"] == "certain" and missing["rows"] == 1
    assert {
        "id",
        "severity",
        "title",
        "evidence",
        "cause",
        "fix",
        "confidence",
        "basis",
        "rows",
        "entry",
    } == missing.keys()


def test_an_override_wins_over_the_recipe(folder: Path):
    done = dpofit("data", folder / "run.yaml", "cutoff_len=20", "--json")
    assert json.loads(done.stdout)["lengths"]["row_tokens"]["max"] == 20


def test_a_name_is_looked_up_in_dataset_dir(folder: Path):
    assert dpofit("data", "pairs", cwd=folder).returncode == 0
    assert dpofit("data", "pairs", f"dataset_dir={folder / 'data'}").returncode == 0


def test_findings_that_stop_training_exit_1(folder: Path):
    info = folder / "data" / "dataset_info.json"
    info.write_text(info.read_text().replace('"ranking": true', '"ranking": false'))
    done = dpofit("data", folder / "run.yaml")
    assert done.returncode == 1
    assert "the dataset is not declared as ranked" in done.stdout and '"ranking": true' in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "nowhere: this dataset is not defined. Defined: pairs"),
        (["nowhere", "dataset_dir=no/such"], "is no file, no recipe and no data set here"),
        (["data/pairs.jsonl", "cutoff=3"], "says nothing about data"),
        (["data/pairs.jsonl", "cutoff_len=many"], "cutoff_len: is 'many'"),
        (["run.yaml", "stage=sft"], "dpofit data checks preference pairs"),
        (["run.yaml", "dataset=other"], "this dataset is not defined. Defined: pairs"),
        (["run.yaml", "dataset_dir=elsewhere"], "there is no such file"),
        (["data/pairs.jsonl", "--max-response", "9"], "works only with --fix"),
        (["data/pairs.jsonl", "--plot", "l.txt"], "unknown format '.txt'"),
        (["data/pairs.jsonl", "--lengths-out", "no/l.jsonl"], "there is no folder no"),
        (["data/pairs.jsonl", "--logps", "data/pairs.jsonl"], "is not a row of log-probabilities"),
        (["data"], "is a dataset_dir"),
        (["data/dataset_info.json"], "lists data sets and is none itself"),
    ],
)
def test_bad_input_exits_2_and_says_what_would_be_right(folder: Path, arguments: list[str], said: str):
    done = dpofit("data", *arguments, cwd=folder)
    assert done.returncode == 2
    assert said in done.stderr and "Traceback" not in done.stderr
    assert all(line.startswith("error: ") for line in done.stderr.splitlines())


def test_lengths_out_counts_every_pair_once(folder: Path):
    out = folder / "lengths.jsonl"
    assert dpofit("data", folder / "run.yaml", "--lengths-out", out).returncode == 0
    lengths = [json.loads(line) for line in out.read_text().splitlines()]
    assert all(row.keys() == {"prompt", "chosen", "rejected", "count"} for row in lengths)
    assert sum(row["count"] for row in lengths) == 59
    assert len({(row["prompt"], row["chosen"], row["rejected"]) for row in lengths}) == len(lengths)
    refused = dpofit("data", folder / "run.yaml", "--lengths-out", out)
    assert refused.returncode == 2 and "--force" in refused.stderr


def test_predict_reads_the_lengths(folder: Path):
    """The longest pair sets the job's lengths: one of 900 tokens or so among pairs of 100."""
    rows = [pair(n) for n in range(60)]
    write_rows(folder / "data" / "pairs.jsonl", [*rows, pair(99, prompt_words=600)])
    peaks = []
    for name, most in (("all", 1024), ("short", 200)):
        out = folder / f"{name}.jsonl"
        assert dpofit("data", folder / "run.yaml", f"cutoff_len={most}", "--lengths-out", out).returncode == 0
        done = dpofit("predict", "qwen2.5-7b-dpo/lora-1gpu", "--gpu", "80GiB", "--lengths", out, "--json")
        assert done.returncode in (0, 1), done.stderr
        peaks.append(json.loads(done.stdout)["gpu"]["peak_bytes"])
    assert peaks[0] > peaks[1]


def test_text_that_no_encoding_can_print_is_reported(folder: Path):
    (folder / "d.json").write_text(json.dumps([{"prompt": "q \ud83d", "chosen": "x", "rejected": "y", "\ud83d": 1}]))
    for flags in ([], ["--json"]):
        done = dpofit("data", folder / "d.json", *flags)
        assert done.returncode == 0 and "data.broken-encoding" in done.stdout, done.stderr


def test_plot_writes_an_image(folder: Path):
    pytest.importorskip("matplotlib")
    assert dpofit("data", folder / "run.yaml", "--plot", folder / "l.png").returncode == 0
    assert (folder / "l.png").read_bytes().startswith(b"\x89PNG")


def test_the_report_is_at_most_100_columns_wide(folder: Path):
    done = dpofit("data", folder / "run.yaml")
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_the_same_file_gives_the_same_report(folder: Path):
    runs = [dpofit("data", folder / "run.yaml", "--json").stdout for _ in range(2)]
    assert runs[0] == runs[1]


def test_without_the_extra_one_error_names_it():
    code = (
        "import importlib.util as u, sys; real = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name in ('pyarrow', 'rapidfuzz') else real(name, *a)\n"
        "from dpofit.cli.app import main; main(['data', 'x.json'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        "error: dpofit data: needs packages that are not installed: pyarrow, rapidfuzz. "
        "Run, in dpofit's repository: pip install -e '.[data]'\n"
    )


def test_no_torch_and_no_transformers_are_imported(folder: Path):
    code = (
        "import sys\nfrom dpofit.cli.app import main\n"
        f"try: main(['data', {str(folder / 'run.yaml')!r}, '--json'])\nexcept SystemExit: pass\n"
        "print(sorted({'torch', 'transformers', 'pandas', 'datasets'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "[]"


def test_help_has_examples():
    assert "Examples:" in dpofit("data", "--help").stdout


def test_the_documentation_is_made_from_the_checks():
    from dpofit.data.checks import document

    assert (ROOT / "docs" / "data-checks.md").read_text(encoding="utf-8") == document()
