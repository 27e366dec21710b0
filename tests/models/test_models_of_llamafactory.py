"""Every model LLaMA-Factory lists is either known with the right family, or refused in words."""

from __future__ import annotations

import re

import pytest

from dpofit.errors import BadInput
from dpofit.models.known import find_model

pytestmark = pytest.mark.stack

_PROMISED = re.compile(
    r"Qwen/Qwen(1\.5|2|2\.5|3)?-[\d._]+B(-Base|-Chat|-Instruct)?"
    r"|Qwen/Qwen2(\.5)?-Math-[\d.]+B(-Instruct)?"
    r"|Qwen/Qwen2\.5-Coder-(?!72B)[\d.]+B(-Instruct)?"  # a 72B coder is listed there but was never published
    r"|meta-llama/(Meta-)?Llama-(2|3|3\.1|3\.2|3\.3)-\d+[bB](-chat|-Instruct)?(-hf)?"
    r"|mistralai/Mistral-7B(-Instruct)?-v0\.[123]"
    r"|01-ai/Yi(-1\.5|-Coder)?-[\d.]+B(-Chat)?"
    r"|google/gemma-2-\d+b(-it)?|google/gemma-3-(270m|1b).*|google/medgemma-27b-text-it"
    r"|zai-org/GLM-(4|Z1)-\d+B(-Base)?-0414|microsoft/Phi-(3(\.5)?-(mini|medium)|4-mini).*|microsoft/phi-4"
    r"|deepseek-ai/DeepSeek-R1-Distill-.*"
)


def hub_ids() -> list[str]:
    from llamafactory.extras.constants import SUPPORTED_MODELS

    return sorted({hub_id for sources in SUPPORTED_MODELS.values() for hub_id in sources.values()})


def test_every_dense_text_model_of_the_promised_families_is_known() -> None:
    promised = [hub_id for hub_id in hub_ids() if _PROMISED.fullmatch(hub_id)]
    assert len(promised) > 80
    assert [hub_id for hub_id in promised if find_model(hub_id).name.lower() != hub_id.lower()] == []


def test_every_other_model_is_known_or_refused_with_what_is_supported() -> None:
    for hub_id in hub_ids():
        try:
            find_model(hub_id)
        except BadInput as refusal:
            assert hub_id in refusal.problems[0].wrong
            assert "Supported: dense decoders" in refusal.problems[0].right
