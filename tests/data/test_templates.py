"""Token ids of every exported template are those of LLaMA-Factory's own encode_oneturn."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

os.environ.setdefault("DISABLE_VERSION_CHECK", "1")
pytestmark = pytest.mark.stack
pytest.importorskip("llamafactory")

from dpofit.data.convert import Message, Pair  # noqa: E402
from dpofit.data.templates import Thinking, templates  # noqa: E402
from dpofit.data.tokenizer import Tokenizer, load_tokenizer  # noqa: E402
from dpofit.data.tokens import ExactCounter  # noqa: E402

U, A, O = "user", "assistant", "observation"  # noqa: E741
NO_MEDIA = (0, 0, 0)


def pair(*turns: tuple[str, str], chosen: str, rejected: str, system: str = "") -> Pair:
    prompt = tuple(Message(role, text) for role, text in turns)
    return Pair(prompt, Message(A, chosen), Message(A, rejected), system, "", NO_MEDIA)


PAIRS = [
    pair((U, "What was decided?"), chosen="Nothing.", rejected="Everything was, on Tuesday."),
    pair((U, "什么原因？"), chosen="这个问题", rejected="请说明", system="Be brief."),
    pair((U, "One"), (A, "<think>\nhm\n</think>\n\nTwo"), (U, "Three"), chosen="Four", rejected="Five"),
    pair((U, "q"), chosen="<think>\nso\n</think>\n\nyes", rejected="no </think>", system="S {{content}} {{idx}}"),
    pair((U, ""), chosen="", rejected="x"),
    pair((U, "{{content}} and {{idx}}"), (A, "a"), (O, '{"temperature": 3}'), chosen="b\n", rejected=" b"),
    pair((U, "<|im_end|> <s>"), chosen="ends early<|endoftext|> or not", rejected="<|eot_id|>"),
]


def real(name: str, folder: Path, thinking: Thinking, default_system: str | None):
    """LLaMA-Factory's template and transformers' tokenizer, as training sets them up."""
    from copy import deepcopy

    from llamafactory.data import template as module
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    before = module.TEMPLATES[name]
    module.TEMPLATES[name] = deepcopy(before)
    arguments = SimpleNamespace(
        template=name,
        train_on_prompt=False,
        tool_format=None,
        default_system=default_system,
        enable_thinking=thinking.enable_thinking,
        preserve_thinking=thinking.preserve_thinking,
    )
    try:
        return module.get_template_and_fix_tokenizer(tokenizer, arguments), tokenizer
    finally:
        module.TEMPLATES[name] = before


def real_ids(template, tokenizer, one: Pair) -> tuple[list[int], list[int], list[int]]:
    """pairwise.py 41-52: two calls of encode_oneturn, then the efficient eos."""
    prompt = [{"role": m.role, "content": m.content} for m in one.prompt]
    sides = []
    for answer in (one.chosen, one.rejected):
        messages = [*prompt, {"role": answer.role, "content": answer.content}]
        sides.append(template.encode_oneturn(tokenizer, messages, one.system, one.tools))
    eos = [tokenizer.eos_token_id] if template.efficient_eos else []
    return sides[0][0], sides[0][1] + eos, sides[1][1] + eos


def ours(name: str, folder: Path, thinking: Thinking, default_system: str | None) -> ExactCounter:
    tokenizer = load_tokenizer(folder)
    assert isinstance(tokenizer, Tokenizer), tokenizer
    template = templates()[name]
    tokenizer.prepare(template)
    return ExactCounter(tokenizer, template, thinking, default_system)


def test_every_template_of_the_package_is_exported_and_reproduced():
    from llamafactory.data.template import TEMPLATES

    assert set(templates()) == set(TEMPLATES)
    assert [name for name, template in templates().items() if not template.kind] == []


@pytest.mark.parametrize("name", sorted(templates()))
def test_token_ids_equal_encode_oneturn(name: str, model_folder: Path):
    for thinking, default_system in (
        (Thinking(), None),
        (Thinking(enable_thinking=False), "Override."),
        (Thinking(enable_thinking=None, preserve_thinking=True), ""),
    ):
        template, tokenizer = real(name, model_folder, thinking, default_system)
        counter = ours(name, model_folder, thinking, default_system)
        for one in PAIRS:
            assert counter.ids(one) == real_ids(template, tokenizer, one)
        assert counter.tokenizer.eos_id(counter.template) is not None


def test_the_exported_file_is_what_the_installed_package_says():
    import subprocess
    import sys

    script = Path(__file__).resolve().parents[2] / "scripts" / "export_templates.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
