"""LLaMA-Factory's chat templates, as exported by scripts/export_templates.py, and how they lay out a pair."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from dpofit.data.convert import ASSISTANT, OBSERVATION, USER, Message, Pair


@dataclass(frozen=True, slots=True)
class Special:
    """One token added by id: `bos_token` and `eos_token` are the tokenizer's own, another name is that token."""

    name: str


@dataclass(frozen=True, slots=True)
class Thinking:
    """The recipe's keys that change how reasoning templates encode (llamafactory 0.9.5 hparams/data_args.py)."""

    enable_thinking: bool | None = True
    preserve_thinking: bool = False


@dataclass(frozen=True, slots=True)
class Template:
    """One template; slots are pieces of text with `{{content}}`, or special tokens."""

    name: str
    kind: str
    multimodal: bool
    prefix: tuple[str | Special, ...]
    system: tuple[str | Special, ...]
    user: tuple[str | Special, ...]
    assistant: tuple[str | Special, ...]
    observation: tuple[str | Special, ...]
    default_system: str
    stop_words: tuple[str, ...]
    thought_words: tuple[str, str]
    efficient_eos: bool
    replace_eos: bool

    @property
    def empty_thought(self) -> str:
        """template.py 100-102; 480-484 for GLM-4.7, whose empty thought is the closing tag alone."""
        return self.thought_words[1] if self.kind == "reasoning_closing_tag" else "".join(self.thought_words)

    def encodes_exactly(self, pair: Pair) -> bool:
        """Whether `lay_out` gives what LLaMA-Factory encodes: text only, no tools and no function calls."""
        roles = {message.role for message in (*pair.prompt, pair.chosen, pair.rejected)}
        return bool(self.kind) and not pair.tools and not any(pair.media) and roles <= {USER, ASSISTANT, OBSERVATION}


@dataclass(frozen=True, slots=True)
class Layout:
    """The pieces of one pair in order."""

    prompt: tuple[str | Special, ...]
    chosen: tuple[str | Special, ...]
    rejected: tuple[str | Special, ...]


@dataclass(frozen=True, slots=True)
class TokenizerClasses:
    """How transformers picks a tokenizer class, and the pipelines of classes that do not read tokenizer.json's."""

    source: str
    class_of_model_type: Mapping[str, str]
    rebuilt: Mapping[str, Any]  # class -> {"normalizer", "pre_tokenizer"}, or None where it cannot be said beforehand


@cache
def tokenizer_classes() -> TokenizerClasses:
    """From the exported file."""
    return TokenizerClasses(**_document()["tokenizer_classes"])


@cache
def _document() -> dict[str, Any]:
    return json.loads(files("dpofit.data").joinpath("templates.json").read_text(encoding="utf-8"))


@cache
def templates() -> dict[str, Template]:
    """Every template by name; those whose class is not reproduced have an empty `kind`."""
    return {name: _template(name, body) for name, body in _document()["templates"].items()}


def lay_out(template: Template, pair: Pair, thinking: Thinking, default_system: str | None) -> Layout:
    """llamafactory 0.9.5 data/processor/pairwise.py 41-52 over data/template.py 60-76, 132-170, 341-373, 411-436."""
    system = pair.system or (template.default_system if default_system is None else default_system)
    prompt, chosen = _one_turn(template, pair.prompt, pair.chosen, system, thinking)
    _, rejected = _one_turn(template, pair.prompt, pair.rejected, system, thinking)
    if template.efficient_eos:
        chosen, rejected = (*chosen, Special("eos_token")), (*rejected, Special("eos_token"))
    return Layout(prompt, chosen, rejected)


def _one_turn(
    template: Template, prompt: tuple[Message, ...], answer: Message, system: str, thinking: Thinking
) -> tuple[tuple[str | Special, ...], tuple[str | Special, ...]]:
    messages = [*prompt, answer]
    reasoning = template.kind.startswith("reasoning")
    if reasoning:
        strip = _thought_remover(template)
        if not thinking.preserve_thinking:
            for index in range(1, len(messages) - 2, 2):
                messages[index] = strip(messages[index])
        if thinking.enable_thinking is False:
            messages[-1] = strip(messages[-1])
    turns = [tuple(_turn(template, index, message, system)) for index, message in enumerate(messages)]
    head = tuple(piece for turn in turns[:-1] for piece in turn)
    tail = turns[-1]
    if reasoning and all(word.strip() not in messages[-1].content for word in template.thought_words):
        if thinking.enable_thinking:
            tail = (template.empty_thought, *tail)
        else:
            head = (*head, template.empty_thought)
    return head, tail


def _turn(template: Template, index: int, message: Message, system: str) -> Iterator[str | Special]:
    content = message.content
    if index == 0:
        yield from template.prefix
        if system and template.kind == "system_in_user":
            # template.py 356-360: the first slot of the system text, put before the user's
            content = str(_filled(template.system[:1], system)[0]) + content
        elif system:
            yield from _filled(template.system, system)
    slots = {USER: template.user, ASSISTANT: template.assistant, OBSERVATION: template.observation}[message.role]
    idx = str(index // 2) if template.kind != "system_in_user" else None
    yield from _filled(slots, content, idx)


def _filled(slots: tuple[str | Special, ...], content: str, idx: str | None = None) -> list[str | Special]:
    """formatter.py 72-88: each name is replaced once per slot, `content` before `idx`."""
    out: list[str | Special] = []
    for slot in slots:
        if isinstance(slot, str):
            slot = slot.replace("{{content}}", content, 1)
            if idx is not None:
                slot = slot.replace("{{idx}}", idx, 1)
            if slot:
                out.append(slot)
        else:
            out.append(slot)
    return out


def _thought_remover(template: Template) -> Callable[[Message], Message]:
    opening, closing = (re.escape(word) for word in template.thought_words)
    pattern = re.compile(f"{opening}(.*?){closing}", re.DOTALL)

    def strip(message: Message) -> Message:
        return Message(message.role, pattern.sub("", message.content).lstrip("\n"))

    return strip


def _template(name: str, body: dict[str, Any]) -> Template:
    def slots(key: str) -> tuple[str | Special, ...]:
        return tuple(s if isinstance(s, str) else Special(s.get("special") or s["token"]) for s in body[key])

    return Template(
        name=name,
        kind=body["kind"] or "",
        multimodal=body["multimodal"],
        prefix=slots("prefix"),
        system=slots("system"),
        user=slots("user"),
        assistant=slots("assistant"),
        observation=slots("observation"),
        default_system=body["default_system"],
        stop_words=tuple(body["stop_words"]),
        thought_words=(body["thought_words"][0], body["thought_words"][1]),
        efficient_eos=body["efficient_eos"],
        replace_eos=body["replace_eos"],
    )
