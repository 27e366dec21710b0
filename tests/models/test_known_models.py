"""Known names give the published shape; everything out of scope is refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dpofit.errors import BadInput
from dpofit.models.known import find_model, known_models

# Totals as the model hub prints them from the safetensors headers (tied heads counted once).
PUBLIC_TOTALS = {
    "Qwen/Qwen-1_8B": 1_836_828_672,
    "Qwen/Qwen-7B": 7_721_324_544,
    "Qwen/Qwen-14B": 14_167_290_880,
    "Qwen/Qwen-72B": 72_287_920_128,
    "Qwen/Qwen1.5-0.5B": 463_987_712,
    "Qwen/Qwen1.5-1.8B": 1_836_828_672,
    "Qwen/Qwen1.5-4B": 3_950_369_280,
    "Qwen/Qwen1.5-7B": 7_721_324_544,
    "Qwen/Qwen1.5-14B": 14_167_290_880,
    "Qwen/Qwen1.5-32B": 32_512_218_112,
    "Qwen/Qwen1.5-72B": 72_287_920_128,
    "Qwen/Qwen1.5-110B": 111_209_914_368,
    "Qwen/CodeQwen1.5-7B": 7_250_284_544,
    "Qwen/Qwen2-0.5B": 494_032_768,
    "Qwen/Qwen2-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-2-13b-hf": 13_015_864_320,
    "meta-llama/Llama-2-70b-hf": 68_976_648_192,
    "meta-llama/Meta-Llama-3-8B": 8_030_261_248,
    "meta-llama/Meta-Llama-3.1-70B": 70_553_706_496,
    "meta-llama/Llama-3.1-405B": 405_853_388_800,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    "microsoft/Phi-3-mini-4k-instruct": 3_821_079_552,
    "microsoft/Phi-3-medium-4k-instruct": 13_960_238_080,
    "microsoft/phi-4": 14_659_507_200,
    "microsoft/Phi-4-mini-instruct": 3_836_021_760,
    "google/gemma-2-2b": 2_614_341_888,
    "google/gemma-2-9b": 9_241_705_984,
    "google/gemma-2-27b": 27_227_128_320,
    "google/gemma-3-270m": 268_098_176,
    "google/gemma-3-1b-it": 999_885_952,
    "google/medgemma-27b-text-it": 27_009_002_240,
    "zai-org/glm-4-9b-chat-hf": 9_399_951_360,
    "zai-org/GLM-4-9B-0414": 9_400_279_040,
    "zai-org/GLM-4-32B-0414": 32_566_081_536,
    "01-ai/Yi-Coder-1.5B": 1_476_495_360,
    "01-ai/Yi-6B": 6_061_035_520,
    "01-ai/Yi-1.5-9B": 8_829_407_232,
    "01-ai/Yi-34B": 34_388_917_248,
}


@pytest.mark.parametrize(("name", "total"), PUBLIC_TOTALS.items())
def test_parameter_count_is_the_published_total(name: str, total: int) -> None:
    assert find_model(name).parameters == total


def test_every_known_model_has_a_published_total_above() -> None:
    totals = set(PUBLIC_TOTALS.values())
    assert len(known_models()) >= 140
    assert [name for name in known_models() if find_model(name).parameters not in totals] == []


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("qwen/qwen2.5-72b-INSTRUCT", "Qwen/Qwen2.5-72B-Instruct"),
        ("Qwen2.5-72B", "Qwen/Qwen2.5-72B"),
        ("Qwen-1.8B-Chat", "Qwen/Qwen-1_8B-Chat"),
        ("Llama-2-7B", "meta-llama/Llama-2-7b-hf"),
        ("Llama-3-8B-Instruct", "meta-llama/Meta-Llama-3-8B-Instruct"),
        ("unsloth/Qwen2.5-7B", "Qwen/Qwen2.5-7B"),
        ("modelscope/Llama-2-7b-ms", "meta-llama/Llama-2-7b-hf"),
        ("/data/models/Qwen2.5-72B-Instruct/", "Qwen/Qwen2.5-72B-Instruct"),
        ("C:\\models\\Qwen3-8B", "Qwen/Qwen3-8B"),
    ],
)
def test_a_name_may_be_written_the_ways_people_write_it(written: str, meant: str) -> None:
    assert find_model(written).name == meant


def test_a_path_of_another_machine_says_that_it_was_taken_by_its_name() -> None:
    assert "/data/Qwen3-8B taken for Qwen/Qwen3-8B by its name" in find_model("/data/Qwen3-8B").source


def test_base_and_instruct_keep_their_own_position_limits() -> None:
    assert find_model("Qwen/Qwen2.5-72B").max_positions == 131072
    assert find_model("Qwen/Qwen2.5-72B-Instruct").max_positions == 32768


def test_phi_4_mini_and_glm_4_rotate_a_part_of_each_head() -> None:
    assert find_model("microsoft/Phi-4-mini-instruct").rotary_dim == 96  # three quarters of 128
    assert find_model("zai-org/GLM-4-9B-0414").rotary_dim == 64
    assert find_model("microsoft/phi-4").rotary_dim == 0  # all


def test_gemma_2_caps_scores_and_logits_and_gemma_3_neither() -> None:
    two, three = find_model("google/gemma-2-9b-it"), find_model("google/gemma-3-1b-it")
    assert (two.attention_softcap, two.logit_softcap) == (50.0, 30.0)
    assert (three.attention_softcap, three.logit_softcap) == (None, None)
    assert (two.kinds_of_attention, two.tied_embeddings, three.qk_norm) == (2, True, True)


def test_mistral_0_1_alone_has_a_sliding_window() -> None:
    assert find_model("mistralai/Mistral-7B-v0.1").sliding_window == 4096
    assert find_model("mistralai/Mistral-7B-v0.3").sliding_window is None


def test_every_shape_names_its_source() -> None:
    assert all(find_model(name).source for name in known_models())


@pytest.mark.parametrize(
    ("reference", "why"),
    [
        ("Qwen/Qwen3-30B-A3B", "a mixture of experts"),
        ("mistralai/Mixtral-8x7B-v0.1", "a mixture of experts"),
        ("deepseek-ai/DeepSeek-V3", "a mixture of experts"),
        ("deepseek-ai/DeepSeek-Coder-V2-Base", "a mixture of experts"),
        ("Qwen/Qwen2.5-VL-7B-Instruct", "a vision or audio model"),
        ("Qwen/Qwen2.5-72B-Instruct-AWQ", "a checkpoint quantised beforehand"),
        ("google/gemma-2b-it", "another architecture"),
        ("google/gemma-3-4b-it", "a model that LLaMA-Factory loads whole, with its vision tower and projector"),
        ("/models/gemma-3-27b-pt", "a model that LLaMA-Factory loads whole, with its vision tower and projector"),
        ("microsoft/phi-2", "another architecture"),
        ("zai-org/glm-4-9b-chat", "runs code of its own repository (chatglm), which is not modelled"),
        ("someone/unheard-of", "neither a model known by name nor a folder"),
        ("x" * 5000, "neither a model known by name nor a folder"),
        ("", "neither a model known by name nor a folder"),
    ],
)
def test_what_is_out_of_scope_is_refused_with_the_reason(reference: str, why: str) -> None:
    with pytest.raises(BadInput) as refusal:
        find_model(reference)
    (problem,) = refusal.value.problems
    assert why in problem.wrong
    assert "llama, mistral, phi3, qwen (1), qwen2" in problem.right


def test_a_misspelt_name_is_answered_with_the_nearest_ones() -> None:
    with pytest.raises(BadInput, match=r"Nearest known names: Qwen/Qwen2\.5-7B-Instruct,"):
        find_model("Qwen2.5-7b-Instuct")


def test_a_folder_on_this_machine_wins_over_a_known_name(tmp_path) -> None:
    folder = tmp_path / "Qwen2.5-7B"
    folder.mkdir()
    config = {
        "model_type": "qwen2", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    assert find_model("Qwen2.5-7B", tmp_path).hidden_size == 16
    assert find_model(str(folder)).source == f"read from {folder / 'config.json'}"
    assert find_model(str(folder / "config.json")).name == "Qwen2.5-7B"


def test_a_folder_without_config_json_is_refused(tmp_path) -> None:
    with pytest.raises(BadInput, match=r"has no config\.json"):
        find_model(str(tmp_path))


def test_the_page_of_known_models_is_up_to_date() -> None:
    script = Path(__file__).resolve().parents[2] / "scripts" / "render_models.py"
    checked = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
