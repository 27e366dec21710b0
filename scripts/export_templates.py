#!/usr/bin/env python
"""Write LLaMA-Factory's chat templates, and how transformers picks tokenizers, to tools/dpofit/data/templates.json.

    python scripts/export_templates.py           # rewrite the file
    python scripts/export_templates.py --check   # exit 1 if the file is not what the package says

`dpofit data` counts tokens with this file, so that a laptop without torch gives the numbers training gives.
A template whose class dpofit/data/encode.py reproduces is exact for text-only rows, and
tests/data/test_templates.py compares each of them, token by token, with the package's own `encode_oneturn`.
A template of another class is listed with the reason, and lengths under it are estimates.
"""

from __future__ import annotations

import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

from generated import parser, write_or_check

OUT = Path(__file__).resolve().parent.parent / "tools" / "dpofit" / "data" / "templates.json"

# How encode.py encodes each class; a class that is not here is exported without slots.
KINDS = {
    "Template": "plain",
    "Llama2Template": "system_in_user",
    "ReasoningTemplate": "reasoning",
    "Glm47ReasoningTemplate": "reasoning_closing_tag",
}


def slots_of(formatter: Any) -> list[Any]:
    """Slots as JSON: text stays text, {"bos_token"} becomes {"special": "bos_token"}, {"token": t} stays."""
    out: list[Any] = []
    for slot in formatter.slots:
        if isinstance(slot, str):
            out.append(slot)
        elif isinstance(slot, set):
            # template.py 139-143: only bos_token and eos_token are looked at, anything else adds nothing
            name = next((name for name in ("bos_token", "eos_token") if name in slot), None)
            if name:
                out.append({"special": name})
        else:
            out.append({"token": slot["token"]})
    return out


def export(template: Any) -> dict[str, Any]:
    """One template as JSON."""
    kind = KINDS.get(type(template).__name__)
    plugin = type(template.mm_plugin).__name__
    why_not = "" if kind else f"template class {type(template).__name__} is not reproduced"
    return {
        "kind": kind,
        "not_exact_because": why_not,
        "multimodal": plugin != "BasePlugin",
        "prefix": slots_of(template.format_prefix),
        "system": slots_of(template.format_system),
        "user": slots_of(template.format_user),
        "assistant": slots_of(template.format_assistant),
        "observation": slots_of(template.format_observation),
        "default_system": template.default_system,
        "stop_words": list(template.stop_words),
        "thought_words": list(template.thought_words),
        "efficient_eos": template.efficient_eos,
        "replace_eos": template.replace_eos,
        "enable_thinking": template.enable_thinking,
        "preserve_thinking": template.preserve_thinking,
    }


def tokenizer_classes() -> dict[str, Any]:
    """Which class transformers picks, and which classes build their own pipeline instead of reading tokenizer.json's.

    transformers 5.5.4 tokenization_utils_tokenizers.py convert_to_native_format: a class with an `__init__` of its own
    takes only vocabulary and merges from the file. `rebuilt` holds the pipeline it then has, null where it depends on
    more than the vocabulary.
    """
    import transformers
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES
    from transformers.tokenization_utils_tokenizers import TokenizersBackend

    mapping = {kind: name.removesuffix("Fast") for kind, name in TOKENIZER_MAPPING_NAMES.items() if name}
    rebuilt: dict[str, Any] = {}
    for name in sorted(set(mapping.values())):
        cls = getattr(transformers, name, None)
        if not isinstance(cls, type) or not issubclass(cls, TokenizersBackend) or cls is TokenizersBackend:
            continue
        if "__init__" not in cls.__dict__:
            continue
        try:
            pipeline = json.loads(cls()._tokenizer.to_str())
            rebuilt[name] = {key: pipeline[key] for key in ("normalizer", "pre_tokenizer")}
        except Exception:  # needs a vocabulary or files: not comparable without them
            rebuilt[name] = None
    return {
        "source": f"transformers {version('transformers')}",
        "class_of_model_type": dict(sorted(mapping.items())),
        "rebuilt": rebuilt,
    }


def document() -> str:
    """The whole file as text."""
    os.environ.setdefault("DISABLE_VERSION_CHECK", "1")
    from llamafactory.data.template import TEMPLATES

    body = {
        "source": f"llamafactory {version('llamafactory')} data/template.py, by scripts/export_templates.py",
        "tokenizer_classes": tokenizer_classes(),
        "templates": {name: export(TEMPLATES[name]) for name in sorted(TEMPLATES)},
    }
    return json.dumps(body, ensure_ascii=False, indent=1) + "\n"


if __name__ == "__main__":
    check: bool = parser(__doc__).parse_args().check
    raise SystemExit(write_or_check({OUT: document()}, check))
