"""What is odd about a single usable pair: it loads and trains, and not as was meant."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dpofit.data.convert import USER, Pair
from dpofit.data.templates import Template

# UTF-8 read as Latin-1 or Windows-1252 leaves these pairs; U+FFFD and lone surrogates are what decoders leave.
_WRONG_DECODING = re.compile(
    "Ã[\x80-\xbf©¨ª«¢§¡¶¼¤]|â€[\x80-\xbf™œ˜“”¦]|Â[\xa0-\xbf]|ï¼[\x80-\xbf‚Œ]|\ufffd|[\ud800-\udfff]"
)
_SPECIAL_LOOK = re.compile(r"<\|[^<>|]{1,40}\|>|</?s>|<(?:start|end)_of_turn>|<eo[sdt]>|\[/?INST\]")
_REPEAT_CHARS = 20  # a shorter prompt at the start of an answer may be chance
# llamafactory 0.9.5 extras/constants.py 24, 52, 123
MEDIA_MARKS = ("<image>", "<video>", "<audio>")


class PairRemarks:
    """The remarks on pairs under one template (None when it is unknown)."""

    def __init__(self, template: Template | None) -> None:
        self._template = template
        self._specials = _special_tokens(template) if template else None

    def on(self, pair: Pair) -> Iterator[tuple[str, str]]:
        """(check id, what was seen); an id whose check is an error means that training stops at this row."""
        chosen, rejected = pair.chosen.content, pair.rejected.content
        for name, answer in (("chosen", pair.chosen), ("rejected", pair.rejected)):
            if answer.role == USER:
                yield "answer-role", f"{name} has the user's role"
        empty = [name for name, text in (("chosen", chosen), ("rejected", rejected)) if not text.strip()]
        if empty:
            yield "empty-answer", f"{' and '.join(empty)} is empty"
        elif chosen == rejected:
            yield "identical-answers", f"both are {_head(chosen)}"
        asked = pair.prompt[-1].content
        if not asked.strip() and len(pair.prompt) == 1:
            yield "empty-prompt", "the prompt is empty"
        elif len(asked) >= _REPEAT_CHARS:
            repeats = [name for name, text in (("chosen", chosen), ("rejected", rejected)) if text.startswith(asked)]
            if repeats:
                yield "prompt-in-answer", f"{' and '.join(repeats)} begins with the prompt: {_head(asked)}"
        texts = [*(message.content for message in pair.prompt), chosen, rejected]
        yield from self._text_remarks(texts)
        yield from self._media_remarks(pair)

    def _text_remarks(self, texts: list[str]) -> Iterator[tuple[str, str]]:
        for text in texts:
            if not text.isascii() and (wrong := _WRONG_DECODING.search(text)):
                yield "broken-encoding", repr(text[max(0, wrong.start() - 20) : wrong.end() + 20])
                break
        if self._specials:
            for text in texts:
                if token := self._specials.search(text):
                    yield "special-tokens", f"{token.group()} in {_head(text[max(0, token.start() - 30) :])}"
                    break

    def _media_remarks(self, pair: Pair) -> Iterator[tuple[str, str]]:
        if self._template is None:
            return
        if not self._template.multimodal:
            if any(pair.media):
                yield "media-unsupported", f"{sum(pair.media)} media files under template {self._template.name}"
            return
        for side, answer in (("chosen", pair.chosen), ("rejected", pair.rejected)):
            text = [message.content for message in (*pair.prompt, answer)]
            for mark, files in zip(MEDIA_MARKS, pair.media, strict=True):
                marks = sum(part.count(mark) for part in text)
                if marks != files:
                    yield "media-mismatch", f"{marks} {mark} marks and {files} files (prompt and {side})"
                    return


def _special_tokens(template: Template) -> re.Pattern[str] | None:
    slots = (*template.prefix, *template.system, *template.user, *template.assistant, *template.observation)
    looks = {token for slot in slots if isinstance(slot, str) for token in _SPECIAL_LOOK.findall(slot)}
    tokens = sorted(looks | set(template.stop_words), key=len, reverse=True)
    tokens = [token for token in tokens if len(token) > 2]
    return re.compile("|".join(map(re.escape, tokens))) if tokens else None


def _head(text: str, limit: int = 50) -> str:
    return repr(text if len(text) <= limit else text[: limit - 1] + "…")
