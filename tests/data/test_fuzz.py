"""No data and no dataset_info.json, however odd, ends in a traceback."""

from __future__ import annotations

import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpofit.data.fix import FixPlan
from dpofit.data.spec import COLUMN_KEYS, TAG_KEYS
from dpofit.errors import BadInput

from .helpers import check

LEAF = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.just("<image>\ud83d"))
JSON = st.recursive(
    LEAF,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=6,
)
NAMES = [
    "instruction",
    "input",
    "chosen",
    "rejected",
    "conversations",
    "messages",
    "prompt",
    "output",
    "from",
    "value",
    "role",
    "content",
]
MESSAGE = st.dictionaries(
    st.sampled_from(["from", "value", "role", "content"]),
    st.one_of(JSON, st.sampled_from(["human", "gpt", "x"])),
    max_size=4,
)
ROW = st.dictionaries(st.sampled_from(NAMES), st.one_of(JSON, MESSAGE, st.lists(MESSAGE, max_size=3)), max_size=8)
ENTRY = st.one_of(
    JSON,
    st.fixed_dictionaries(
        {"file_name": st.just("d.json")},
        optional={
            "ranking": LEAF,
            "formatting": st.one_of(st.sampled_from(["alpaca", "sharegpt", "openai"]), JSON),
            "columns": st.one_of(
                JSON, st.dictionaries(st.sampled_from(COLUMN_KEYS), st.one_of(st.sampled_from(NAMES), JSON))
            ),
            "tags": st.one_of(
                JSON, st.dictionaries(st.sampled_from(TAG_KEYS), st.one_of(st.sampled_from(NAMES), JSON))
            ),
        },
    ),
)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    rows=st.one_of(st.lists(ROW, max_size=4), JSON),
    entry=ENTRY,
    template=st.sampled_from([None, "qwen", "qwen2_vl", "llama2"]),
)
def test_odd_data_gives_findings_or_bad_input(tmp_path_factory, rows, entry, template):
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "d.json").write_text(json.dumps(rows))
    (folder / "dataset_info.json").write_text(json.dumps({"d": entry}))
    try:
        result = check(
            "d",
            f"dataset_dir={folder}",
            "cutoff_len=5",
            *([f"template={template}"] if template else []),
            fix=(folder / "out", FixPlan(outliers="cap")),
        )
    except BadInput as bad:
        assert all(problem.wrong and problem.right for problem in bad.problems)
    else:
        assert result.fixed is not None
        assert (
            len((folder / "out" / "pairs.jsonl").read_text(encoding="utf-8").splitlines()) == result.fixed.pairs_written
        )
    check(folder / "d.json") if isinstance(rows, list) else None
