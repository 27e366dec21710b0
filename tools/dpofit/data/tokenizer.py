"""A model's fast tokenizer, read from its local folder without transformers, set up as LLaMA-Factory sets it up."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from dpofit.data.templates import Template, tokenizer_classes

# Lone surrogates cannot be encoded; pandas drops them from a JSON list, and JSON lines with them do not load.
_SURROGATE = re.compile("[\ud800-\udfff]")


class Tokenizer:
    """A Hugging Face fast tokenizer from a local folder: its tokenizer.json plus what tokenizer_config.json adds."""

    def __init__(
        self, backend: Any, source: str, bos: str | None, eos: str | None, unk: str | None, doubt: str
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend, self.source = backend, source
        self.doubt = doubt  # why training may tokenize otherwise; "" when it does not
        self._bos, self._eos, self._unk = bos, eos, unk

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Ids without special tokens of the post-processor, as `tokenizer.encode(text, add_special_tokens=False)`."""
        clean = [text if text.isascii() else _SURROGATE.sub("", text) for text in texts]
        return [encoding.ids for encoding in self._backend.encode_batch(clean, add_special_tokens=False)]

    def special(self, name: str) -> list[int]:
        """template.py 113-130: bos and eos only if the tokenizer has them; a named token, or unk for it, always."""
        if name in ("bos_token", "eos_token"):
            token = self._bos if name == "bos_token" else self._eos
            found = None if token is None else self._backend.token_to_id(token)
            return [] if found is None else [found]
        found = self._backend.token_to_id(name)
        if found is None and self._unk is not None:
            found = self._backend.token_to_id(self._unk)
        return [-1 if found is None else found]

    def eos_id(self, template: Template) -> int | None:
        """The token that ends an answer: template.py 173-198 makes the first stop word the eos of some templates."""
        token = template.stop_words[0] if template.replace_eos and template.stop_words else self._eos
        found = None if token is None else self._backend.token_to_id(token)
        if found is None or template.efficient_eos or template.replace_eos:
            return found
        written = "".join(slot for slot in template.assistant if isinstance(slot, str))
        stop = next((word for word in template.stop_words if word in written), None)
        return self._backend.token_to_id(stop) if stop else found

    def head(self, text: str, tokens: int) -> str:
        """The longest head that ends between tokens and is at most `tokens` of them when it stands alone."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        if len(encoding.ids) <= tokens:
            return text
        for kept in range(tokens, 0, -1):  # half a word may take more tokens alone than it took in the word
            head = text[: encoding.offsets[kept][0]]
            if len(self._backend.encode(head, add_special_tokens=False).ids) <= tokens:
                return head
        return ""

    def prepare(self, template: Template) -> None:
        """template.py 189-218 fix_special_tokens: eos, then the stop words, become special tokens."""
        from tokenizers import AddedToken

        words = list(template.stop_words)
        if template.replace_eos and words:
            self._eos = words.pop(0)
            self._backend.add_special_tokens([AddedToken(self._eos, normalized=False, special=True)])
        if self._eos is None:
            self._eos = "<|endoftext|>"
            self._backend.add_special_tokens([AddedToken(self._eos, normalized=False, special=True)])
        if words:
            self._backend.add_special_tokens([AddedToken(word, normalized=False, special=True) for word in words])


def load_tokenizer(folder: Path) -> Tokenizer | str:
    """The tokenizer in a model folder, or why its tokens cannot be counted exactly."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return f"{folder} has no tokenizer.json"
    import tokenizers

    config = _config(folder / "tokenizer_config.json")
    if "auto_map" in config and "AutoTokenizer" in config["auto_map"]:
        return f"{folder} has a tokenizer of its own code (auto_map), which dpofit does not run"
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for every unreadable file
        return f"{file} cannot be read: {error}"
    known = {str(token) for token in backend.get_added_tokens_decoder().values()}
    for entry in config.get("added_tokens_decoder", {}).values():
        if entry["content"] not in known:
            token = tokenizers.AddedToken(**{key: value for key, value in entry.items() if key != "__type"})
            (backend.add_special_tokens if token.special else backend.add_tokens)([token])
    bos, eos, unk = (_token(config.get(key)) for key in ("bos_token", "eos_token", "unk_token"))
    return Tokenizer(backend, str(file), bos, eos, unk, _doubt(folder, config, backend))


def _doubt(folder: Path, config: dict[str, Any], backend: Any) -> str:
    """Why transformers would not tokenize as tokenizer.json says, "" if it does.

    transformers 5.5.4 models/auto/tokenization_auto.py 690-740 picks the class; a class that builds its own pipeline
    takes only the vocabulary from tokenizer.json, so the two are compared.
    """
    known = tokenizer_classes()
    named = str(config.get("tokenizer_class") or "").removesuffix("Fast")
    usual = known.class_of_model_type.get(str(_config(folder / "config.json").get("model_type")))
    if usual and named and usual != named:
        return ""  # a class that is not the model's own: tokenizer.json is read as it is
    name = named or usual or ""
    if name not in known.rebuilt:
        return ""
    pipeline = known.rebuilt[name]
    own = {key: _state(getattr(backend, key)) for key in ("normalizer", "pre_tokenizer")}
    if pipeline is not None and not config.get("add_prefix_space") and _same(own, pipeline):
        return ""
    return f"{name} of {known.source} does not use the pipeline of {folder / 'tokenizer.json'}"


def _state(part: Any) -> Any:
    return None if part is None else json.loads(part.__getstate__())


def _same(a: Any, b: Any) -> bool:
    """Equal but for `trim_offsets`, which moves offsets and no token."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = (a.keys() | b.keys()) - {"trim_offsets"}
        return all(_same(a.get(key), b.get(key)) for key in keys)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)


def _config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def _token(value: Any) -> str | None:
    return value["content"] if isinstance(value, dict) else value
