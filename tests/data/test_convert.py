"""convert() agrees with LLaMA-Factory's converters and its pairwise filter on any row, not only on sensible ones."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

os.environ.setdefault("DISABLE_VERSION_CHECK", "1")
pytestmark = pytest.mark.stack
pytest.importorskip("llamafactory")

from dpofit.data.checks import CHECKS  # noqa: E402
from dpofit.data.convert import Lost, Pair, convert  # noqa: E402
from dpofit.data.spec import COLUMN_KEYS, TAG_KEYS, Spec, spec_of  # noqa: E402

TEXT = st.sampled_from(["", "a", "b c", "{}", '{"name": "f", "arguments": {}}', "<think>\nx\n</think>\n\n{}"])
ANY = st.one_of(TEXT, st.none(), st.integers(0, 2), st.booleans(), st.just([]), st.just({}), st.just(["a"]))
ROLE = st.sampled_from(["human", "gpt", "user", "assistant", "system", "observation", "function_call", "bot", None])


def mostly(usual: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(usual, usual, usual, usual, ANY)


MESSAGE = st.one_of(
    st.fixed_dictionaries({"from": ROLE, "value": mostly(TEXT), "role": ROLE, "content": mostly(TEXT)}),
    st.fixed_dictionaries({"from": st.just("human"), "value": TEXT, "role": st.just("user"), "content": TEXT}),
    st.fixed_dictionaries({"from": st.just("gpt"), "value": TEXT, "role": st.just("assistant"), "content": TEXT}),
)
ROW = st.fixed_dictionaries(
    {
        "instruction": mostly(TEXT),
        "input": mostly(TEXT),
        "output": mostly(TEXT),
        "history": st.one_of(st.none(), st.lists(st.tuples(mostly(TEXT), mostly(TEXT)).map(list), max_size=2)),
        "conversations": st.one_of(st.lists(MESSAGE, max_size=4), st.none()),
        "chosen": st.one_of(TEXT, MESSAGE, ANY),
        "rejected": st.one_of(TEXT, MESSAGE, ANY),
        "system": st.one_of(TEXT, st.none()),
        "tools": st.sampled_from(["", None, "[]", "no json"]),
        "label": st.one_of(st.none(), st.booleans()),
    }
)
ENTRY = st.fixed_dictionaries(
    {
        "formatting": st.sampled_from(["alpaca", "sharegpt", "openai"]),
        "ranking": st.sampled_from([True, True, True, "false"]),
        "columns": st.fixed_dictionaries(
            {
                "prompt": st.just("instruction"),
                "messages": st.just("conversations"),
                "chosen": st.just("chosen"),
                "rejected": st.just("rejected"),
            },
            optional={
                "query": st.just("input"),
                "response": st.just("output"),
                "history": st.just("history"),
                "system": st.just("system"),
                "tools": st.just("tools"),
                "kto_tag": st.just("label"),
            },
        ),
    },
    optional={
        "tags": st.one_of(
            st.just({"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}),
            st.just(
                {
                    "role_tag": "from",
                    "content_tag": "value",
                    "user_tag": "human",
                    "assistant_tag": "gpt",
                    "system_tag": "system",
                }
            ),
        )
    },
)


def attribute(entry: dict[str, Any]):
    from llamafactory.data.parser import DatasetAttr

    attr = DatasetAttr("file", dataset_name="d")
    attr.join(entry)
    return attr


def real(row: dict[str, Any], entry: dict[str, Any], folder: str) -> Pair | str:
    """A Pair, "dropped", or the name of the exception, from the real converter, filter and template."""
    from types import SimpleNamespace

    from llamafactory.data.converter import get_dataset_converter

    from .real import _tokenizer

    tokenizer, template = _tokenizer(folder, "qwen")
    try:
        out = get_dataset_converter(entry["formatting"], attribute(entry), SimpleNamespace(media_dir=""))(row)
        prompt, response = out["_prompt"], out["_response"]
        if len(prompt) % 2 != 1 or len(response) < 2:  # pairwise.py 76
            return "dropped"
        for answer in response[:2]:
            template.encode_oneturn(tokenizer, [*prompt, answer], out["_system"], out["_tools"])
    except Exception as error:
        return type(error).__name__
    from dpofit.data.convert import Message

    messages = [Message(str(m["role"]), m["content"]) for m in (*prompt, *response[:2])]
    return Pair(tuple(messages[:-2]), *messages[-2:], out["_system"] or "", out["_tools"] or "", (0, 0, 0))


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(row=ROW, entry=ENTRY)
def test_every_row_meets_the_same_fate(row: dict[str, Any], entry: dict[str, Any], model_folder):
    theirs = real(row, entry, str(model_folder))
    ours = convert(row, spec_of(entry))
    if isinstance(theirs, Pair):
        assert ours == theirs
    else:
        assert isinstance(ours, Lost), theirs
        assert ours.fatal == (theirs != "dropped"), (ours, theirs)


@settings(max_examples=300, deadline=None)
@given(entry=ENTRY)
def test_an_entry_is_read_as_the_real_parser_reads_it(entry: dict[str, Any]):
    spec, attr = spec_of(entry), attribute(entry)
    for key in ("formatting", "ranking", *COLUMN_KEYS, *TAG_KEYS):
        assert getattr(spec, key) == getattr(attr, key)


def test_defaults_are_the_real_ones():
    attr = attribute({})
    assert all(getattr(Spec(), key) == getattr(attr, key) for key in ("ranking", *COLUMN_KEYS, *TAG_KEYS))


def test_every_reason_is_a_documented_check_and_fatal_ones_are_errors():
    import re
    from pathlib import Path

    import dpofit.data.convert as module

    source = Path(module.__file__).read_text()
    said = re.findall(r'Lost\(\s*"([a-z-]+)"(.*?)\)\)?(?: from None)?\n', source)
    assert len(said) > 15
    for reason, rest in said:
        assert reason in CHECKS
        assert (CHECKS[reason].severity == "error") == (
            rest.rstrip().endswith("True") or reason in ("not-ranked", "kto-rows")
        )
