"""Guesses, from the keys of the first rows, the dataset_info.json entry that makes pairs of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dpofit.data.convert import Pair, convert
from dpofit.data.loading import Row
from dpofit.data.spec import Spec

# Names that public preference data sets use, best first.
ANSWER_COLUMNS = (
    *(("chosen", "rejected"), ("preferred", "dispreferred"), ("accepted", "rejected"), ("win", "lose")),
    *(("chosen_response", "rejected_response"), ("response_chosen", "response_rejected"), ("better", "worse")),
    *(("preferred_response", "dispreferred_response"), ("response_j", "response_k")),
    *(("pos", "neg"), ("positive", "negative")),
)  # fmt: skip
PROMPT_COLUMNS = ("instruction", "prompt", "question", "query", "input", "context", "problem")
MESSAGE_COLUMNS = ("conversations", "messages", "conversation", "prompt", "dialog", "history")
ROLE_TAGS = (("from", "value"), ("role", "content"), ("role", "value"), ("speaker", "text"))
USERS = ("human", "user", "Human", "User", "prompter")
ASSISTANTS = ("gpt", "assistant", "Assistant", "bot", "model", "chatgpt", "bing")
OTHERS = {"observation_tag": ("observation", "tool"), "function_tag": ("function_call",), "system_tag": ("system",)}


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A spec that gives pairs, of the rows as they are or (`rewrites`) of rows that `canonical` has rewritten."""

    spec: Spec
    rewrites: bool
    pairs: int
    rows: int


CANONICAL = replace(Spec(), formatting="sharegpt", ranking=True, chosen="chosen", rejected="rejected", system="system")


def suggest(rows: Sequence[Row]) -> Suggestion | None:
    """The best entry for these rows, tried on them; None when nothing gives a pair."""
    best: Suggestion | None = None
    for spec in _specs(rows):
        pairs = sum(isinstance(convert(row, spec), Pair) for row in rows)
        if pairs and (best is None or pairs > best.pairs):
            best = Suggestion(spec, False, pairs, len(rows))
    rewritten = [canonical(row) for row in rows]
    pairs = sum(row is not None for row in rewritten)
    if pairs and (best is None or pairs > 2 * best.pairs):
        best = Suggestion(CANONICAL, True, pairs, len(rows))
    return best


def _specs(rows: Sequence[Row]) -> list[Spec]:
    keys = _keys(rows)
    specs = []
    for chosen, rejected in ANSWER_COLUMNS:
        if not {chosen, rejected} <= keys:
            continue
        system = "system" if "system" in keys else None
        blank = replace(
            Spec(), ranking=True, chosen=chosen, rejected=rejected, system=system, query=None, response=None
        )
        for prompt in (name for name in PROMPT_COLUMNS if name in keys):
            history = "history" if _kind_of(rows, "history") is list else None
            query = "input" if prompt == "instruction" and "input" in keys else None
            specs.append(replace(blank, prompt=prompt, query=query, history=history, messages=None))
        for messages in (name for name in MESSAGE_COLUMNS if _kind_of(rows, name) is list):
            sharegpt = replace(blank, formatting="sharegpt", prompt=None, messages=messages)
            specs += _tagged(rows, sharegpt)
    return specs


def _tagged(rows: Sequence[Row], spec: Spec) -> list[Spec]:
    messages = [
        m for row in rows for m in (*_list(row.get(spec.messages)), row.get(spec.chosen)) if isinstance(m, dict)
    ]
    for role, content in ROLE_TAGS:
        if any(role in message and content in message for message in messages):
            counts = Counter(message.get(role) for message in messages if isinstance(message.get(role), str))
            user = next((tag for tag in USERS if counts[tag]), USERS[0])
            assistant = next((tag for tag in ASSISTANTS if counts[tag]), ASSISTANTS[0])
            others = {key: next((tag for tag in tags if counts[tag]), tags[0]) for key, tags in OTHERS.items()}
            return [replace(spec, role_tag=role, content_tag=content, user_tag=user, assistant_tag=assistant, **others)]
    return []


def canonical(row: Row) -> Row | None:
    """The row in sharegpt form, whatever of the known shapes it has; None when it gives no pair.

    Known: text or message answers, answers that are whole conversations (Hugging Face's "implicit prompt" format),
    a prompt as text or messages, a list of exactly two answers ranked best first.
    """
    answers = next(
        ((row[a], row[b]) for a, b in ANSWER_COLUMNS if row.get(a) is not None and row.get(b) is not None), None
    )
    if answers is None:
        both = row.get("output") or row.get("responses") or row.get("answers")
        answers = (both[0], both[1]) if isinstance(both, list) and len(both) == 2 else None
    if answers is None:
        return None
    sides = [_conversation(answer, "gpt") for answer in answers]
    if not sides[0] or not sides[1] or sides[0][-1]["from"] != "gpt" or sides[1][-1]["from"] != "gpt":
        return None
    head = sides[0][:-1]
    if head != sides[1][:-1]:
        return None
    if not head:
        column = next((name for name in (*MESSAGE_COLUMNS, *PROMPT_COLUMNS) if row.get(name)), None)
        head = _conversation(row[column], "human") if column else []
    system = row.get("system") if isinstance(row.get("system"), str) else ""
    out = {"system": system, "conversations": head, "chosen": sides[0][-1], "rejected": sides[1][-1]}
    return out if isinstance(convert(out, CANONICAL), Pair) else None


def _conversation(value: Any, role: str) -> list[dict[str, str]]:
    if isinstance(value, str):
        return [{"from": role, "value": value}]
    out = []
    for message in [value] if isinstance(value, dict) else _list(value):
        if not isinstance(message, dict):
            return []
        tags = next(
            ((r, c) for r, c in ROLE_TAGS if isinstance(message.get(r), str) and isinstance(message.get(c), str)), None
        )
        if tags is None:
            return []
        out.append({"from": _canonical_role(message[tags[0]]), "value": message[tags[1]]})
    return out


def _canonical_role(tag: str) -> str:
    if tag in USERS:
        return "human"
    if tag in ASSISTANTS:
        return "gpt"
    return {"tool": "observation"}.get(tag, tag)


def _keys(rows: Sequence[Row]) -> set[str]:
    return {key for row in rows for key in row if isinstance(key, str)}


def _kind_of(rows: Sequence[Row], column: str) -> type | None:
    return next((type(row[column]) for row in rows if row.get(column) is not None), None)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
