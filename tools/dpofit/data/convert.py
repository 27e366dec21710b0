"""What LLaMA-Factory's converters make of one row: a preference pair, a row it drops, or a row it dies on.

Follows llamafactory 0.9.5 data/converter.py 85-372 and data/processor/pairwise.py 75-79 line by line, on rows
in which a key that other rows have counts as null (Arrow fills it in). tests/data compares it with the real
converters on generated rows.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from dpofit.data.loading import Row
from dpofit.data.spec import Spec

USER, ASSISTANT, SYSTEM, FUNCTION, OBSERVATION = "user", "assistant", "system", "function", "observation"
# llamafactory 0.9.5 data/converter.py 343-355: what the openai converter puts after a system message, or instead of one
OPENAI_SYSTEM = "detailed thinking off"


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Pair:
    """A usable pair, as it goes into `Template.encode_oneturn`."""

    prompt: tuple[Message, ...]
    chosen: Message
    rejected: Message
    system: str
    tools: str
    media: tuple[int, int, int]  # numbers of images, videos, audios

    @property
    def prompt_text(self) -> str:
        """System and every prompt message, for comparing prompts."""
        return "\n".join((self.system, *(message.content for message in self.prompt)))


@dataclass(frozen=True, slots=True)
class Lost:
    """A row that gives no pair. `fatal`: LLaMA-Factory stops there; otherwise it goes on without the row."""

    reason: str  # an id of dpofit.data.checks, without the `data.`
    text: str
    fatal: bool = False


class _Stop(Exception):
    def __init__(self, lost: Lost) -> None:
        self.lost = lost


def convert(row: Row, spec: Spec) -> Pair | Lost:
    """One row, loaded, to what training would use of it."""
    try:
        if spec.formatting == "alpaca":
            prompt, response, system, tools = _alpaca(row, spec)
        elif spec.formatting == "sharegpt":
            prompt, response, system, tools = _sharegpt(row, spec)
        else:
            prompt, response, system, tools = _openai(row, spec)
        media = _media(row, spec)
        return _pair(prompt, response, system, tools, media)
    except _Stop as stop:
        return stop.lost


Converted = tuple[list[tuple[str, Any]], list[tuple[str, Any]], Any, Any]


def _alpaca(row: Row, spec: Spec) -> Converted:
    prompt: list[tuple[str, Any]] = []
    history = row.get(spec.history) if spec.history else None
    if isinstance(history, list):
        for turn in history:
            if not isinstance(turn, list | tuple | str) or len(turn) != 2:
                raise _Stop(Lost("history-shape", f"history turn {_short(turn)} is not [question, answer]", True))
            prompt += [(USER, turn[0]), (ASSISTANT, turn[1])]
    query: list[Any] = [row.get(key) for key in (spec.prompt, spec.query) if key and row.get(key)]
    if not all(isinstance(part, str) for part in query):
        wrong = next(part for part in query if not isinstance(part, str))
        raise _Stop(Lost("prompt-not-text", f"the prompt is {_kind(wrong)}: {_short(wrong)}", True))
    prompt.append((USER, "\n".join(query)))

    chosen = row.get(spec.chosen) if spec.chosen else None
    rejected = row.get(spec.rejected) if spec.rejected else None
    system = row.get(spec.system) if spec.system else ""
    if spec.kto_tag and isinstance(row.get(spec.kto_tag), bool):
        if spec.response is None:
            raise _Stop(Lost("kto-rows", f"{spec.kto_tag} is set and `columns` names no response", True))
        answer, good = (ASSISTANT, row.get(spec.response)), row[spec.kto_tag]
        response = [answer, (ASSISTANT, "")] if good else [(ASSISTANT, ""), answer]
        return prompt, response, system, _tools(row, spec)
    if not (spec.ranking and isinstance(chosen, str) and isinstance(rejected, str)):
        _explain_missing(chosen, rejected, str, "text", spec)
    return prompt, [(ASSISTANT, chosen), (ASSISTANT, rejected)], system, _tools(row, spec)


def _sharegpt(row: Row, spec: Spec) -> Converted:
    messages, system = _messages_and_system(row, spec)
    roles = _roles(spec)
    odd, even = (spec.user_tag, spec.observation_tag), (spec.assistant_tag, spec.function_tag)
    aligned: list[tuple[str, Any]] = []
    for turn, message in enumerate(messages):
        tag = message.get(spec.role_tag)
        if tag not in (odd, even)[turn % 2]:
            raise _Stop(_wrong_turn(tag, turn, (odd, even)[turn % 2], roles, spec))
        aligned.append((roles[tag], message.get(spec.content_tag)))
    if len(aligned) % 2 == 0:
        raise _Stop(_even(len(aligned)))
    response = _answers(row, spec, roles)
    return aligned, response, system, _tools(row, spec)


def _openai(row: Row, spec: Spec) -> Converted:
    messages, system = _messages_and_system(row, spec)
    if system and not isinstance(system, str | list):  # the converter appends text to it, even in rows it drops
        raise _Stop(Lost("content-not-text", f"the system text is {_kind(system)}: {_short(system)}", True))
    roles = _roles(spec)
    aligned: list[tuple[str, Any]] = []
    waiting: list[Any] = []
    for message in messages:
        tag, content = message.get(spec.role_tag), message.get(spec.content_tag)
        if tag in (spec.assistant_tag, spec.function_tag) and message.get("tool_calls"):
            content = json.dumps([call["function"] for call in message["tool_calls"]], ensure_ascii=False)
            tag = spec.function_tag
        if tag == spec.observation_tag:
            waiting.append(content)
            continue
        if waiting:
            for text in waiting:
                if not isinstance(text, str):
                    raise _Stop(Lost("content-not-text", f"a tool's answer is {_kind(text)}: {_short(text)}", True))
            aligned.append((OBSERVATION, "\n</tool_response>\n<tool_response>\n".join(waiting)))
            waiting = []
        if not _known(tag, roles):
            raise _Stop(Lost("role-unknown", f"role {tag!r} is not one of {_names(roles)}", True))
        aligned.append((roles[tag], content))
    for turn, (role, _) in enumerate(aligned):
        expected = ((USER, OBSERVATION), (ASSISTANT, FUNCTION))[turn % 2]
        if role not in expected:
            text = f"message {turn + 1} is from {role}, where {' or '.join(expected)} belongs"
            raise _Stop(Lost("role-order", text))
    if len(aligned) % 2 == 0:
        raise _Stop(_even(len(aligned)))
    response = _answers(row, spec, roles)
    tools = _tools(row, spec)
    if isinstance(tools, dict | list):
        tools = json.dumps(tools, ensure_ascii=False)
    if not system:
        system = "" if tools else OPENAI_SYSTEM
    elif tools and isinstance(system, str):
        system += "\n"
    elif "detailed thinking on" not in system and OPENAI_SYSTEM not in system and isinstance(system, str):
        system += "\n" + OPENAI_SYSTEM
    return aligned, response, system, tools


def _messages_and_system(row: Row, spec: Spec) -> tuple[list[Row], Any]:
    messages = row.get(spec.messages) if spec.messages else None
    if not isinstance(messages, list):
        raise _Stop(Lost("messages-shape", f"{spec.messages} is {_kind(messages)}, not a list of messages", True))
    for message in messages:
        if not isinstance(message, dict):
            raise _Stop(Lost("messages-shape", f"a message is {_kind(message)}: {_short(message)}", True))
    system = row.get(spec.system) if spec.system else ""
    if spec.system_tag and messages and messages[0].get(spec.role_tag) == spec.system_tag:
        system, messages = messages[0].get(spec.content_tag), messages[1:]
    return messages, system


def _roles(spec: Spec) -> dict[Any, str]:
    return {
        spec.user_tag: USER,
        spec.assistant_tag: ASSISTANT,
        spec.observation_tag: OBSERVATION,
        spec.function_tag: FUNCTION,
        spec.system_tag: SYSTEM,
    }


def _known(tag: Any, roles: dict[Any, str]) -> bool:
    return isinstance(tag, str | None) and tag in roles


def _answers(row: Row, spec: Spec, roles: dict[Any, str]) -> list[tuple[str, Any]]:
    chosen = row.get(spec.chosen) if spec.chosen else None
    rejected = row.get(spec.rejected) if spec.rejected else None
    if spec.kto_tag and isinstance(row.get(spec.kto_tag), bool):
        # its last prompt message becomes the answer, which leaves a prompt of even length
        raise _Stop(Lost("kto-rows", f"{spec.kto_tag} makes this a KTO row"))
    if not (spec.ranking and isinstance(chosen, dict) and isinstance(rejected, dict)):
        _explain_missing(chosen, rejected, dict, "one message object", spec)
    response = []
    for name, answer in ((spec.chosen, chosen), (spec.rejected, rejected)):
        assert isinstance(answer, dict)
        tag = answer.get(spec.role_tag)
        if not _known(tag, roles):
            raise _Stop(Lost("role-unknown", f"{name} has role {tag!r}, not one of {_names(roles)}", True))
        response.append((roles[tag], answer.get(spec.content_tag)))
    return response


def _tools(row: Row, spec: Spec) -> Any:
    return row.get(spec.tools) if spec.tools else ""


def _media(row: Row, spec: Spec) -> tuple[int, int, int]:
    counts = []
    for column in (spec.images, spec.videos, spec.audios):
        value = row.get(column) if column else None
        counts.append(0 if value is None else len(value) if isinstance(value, list) else 1)
    return counts[0], counts[1], counts[2]


def _pair(
    prompt: list[tuple[str, Any]], response: list[tuple[str, Any]], system: Any, tools: Any, media: tuple[int, int, int]
) -> Pair:
    for role, content in (*prompt, *response):
        # formatter.py 76-78: "Expected a string, got …" ends the preprocessing of the whole dataset
        if not isinstance(content, str):
            raise _Stop(Lost("content-not-text", f"the {role} text is {_kind(content)}: {_short(content)}", True))
        if role == FUNCTION:
            _must_be_calls(content)
    if tools:
        if not isinstance(tools, str):
            raise _Stop(Lost("tools-not-text", f"tools is {_kind(tools)}, not JSON text", True))
        _must_be_json(tools, "tools")
    if system and not isinstance(system, str):
        raise _Stop(Lost("content-not-text", f"the system text is {_kind(system)}: {_short(system)}", True))
    messages = [Message(role, content) for role, content in (*prompt, *response)]
    if any(message.role == SYSTEM for message in messages):
        # template.py 166: NotImplementedError("Unexpected role: system")
        raise _Stop(Lost("role-unknown", "an answer or a later message has the system role", True))
    *head, chosen, rejected = messages
    return Pair(tuple(head), chosen, rejected, system or "", tools or "", media)


def _must_be_calls(content: str) -> None:
    """formatter.py 97-141 FunctionFormatter: after the thoughts, JSON with `name` and `arguments`."""
    tagged = re.search(r"<tool_call>(.*?)</tool_call>", content, re.DOTALL)
    body = tagged.group(1) if tagged else re.sub(r"<think>\n.*?\n</think>\n\n", "", content, count=1, flags=re.DOTALL)
    calls = _must_be_json(body, "a function call")
    for call in calls if isinstance(calls, list) else [calls]:
        if not isinstance(call, dict) or not {"name", "arguments"} <= call.keys():
            raise _Stop(Lost("tools-not-json", f"a function call lacks name or arguments: {_short(content)}", True))


def _must_be_json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise _Stop(Lost("tools-not-json", f"{what} is not JSON: {_short(text)}", True)) from None


def _explain_missing(chosen: Any, rejected: Any, wanted: type, wanted_name: str, spec: Spec) -> None:
    """The converter finds no two answers; the row then has one response or none, and pairwise.py drops it."""
    for name, answer in ((spec.chosen, chosen), (spec.rejected, rejected)):
        if answer is None:
            raise _Stop(Lost("answer-missing", f"{name or 'an answer'} is missing or null"))
        if not isinstance(answer, wanted):
            text = f"{name} is {_kind(answer)}, where {spec.formatting} wants {wanted_name}: {_short(answer)}"
            raise _Stop(Lost("answer-shape", text))
    raise _Stop(Lost("not-ranked", "`ranking` is not set, so chosen and rejected are ignored"))


def _wrong_turn(tag: Any, turn: int, expected: tuple[Any, ...], roles: dict[Any, str], spec: Spec) -> Lost:
    belongs = " or ".join(repr(name) for name in expected if name is not None)
    text = f"message {turn + 1} has {spec.role_tag}: {tag!r}, where {belongs} belongs"
    return Lost("role-order" if _known(tag, roles) else "role-tags", text)


def _even(count: int) -> Lost:
    if count == 0:
        return Lost("prompt-empty-list", "there are no prompt messages")
    return Lost("even-prompt", f"the prompt has {count} messages; it must end with the user's, so an odd number")


def _names(roles: dict[Any, str]) -> str:
    return ", ".join(repr(tag) for tag in roles if tag is not None)


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {list: "a list", dict: "an object", str: "text", bool: "a boolean", bytes: "binary"}
    return names.get(type(value), "a number")


def _short(value: Any, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
