"""What transformers before 5 and its default optimizer allocate, byte by byte, worked out from their sources."""

import pytest

pytestmark = pytest.mark.stack

ROWS, TOKENS, HEADS, GROUPS, HEAD_DIM, HIDDEN = 2, 512, 4, 2, 16, 64
SQUARE = ROWS * TOKENS * TOKENS  # entries of a mask of every row
QUERY_BYTES = ROWS * TOKENS * HEADS * HEAD_DIM * 2

STEP = {
    "model_type": "qwen2", "vocab_size": 64, "hidden_size": HIDDEN, "intermediate_size": 64, "layers": 2,
    "heads": HEADS, "kv_heads": GROUPS, "head_dim": HEAD_DIM, "tied_embeddings": False, "rows": ROWS, "tokens": TOKENS,
    "stage": "sft", "precision": "pure_bf16", "optimizer": "",
}  # fmt: skip


def _trace(**changes):
    from dpofit.trace.request import TraceRequest
    from dpofit.trace.step import trace_step

    return trace_step(TraceRequest(**(STEP | changes))).recorder


def _most_bytes(recorder, wanted, phase):
    """The most that storages of these numbers hold together in a phase."""
    live = most = 0
    for mark in recorder.marks:
        if mark.phase == phase:
            most = max(most, live)
        live += mark.size_bytes if mark.index in wanted else 0
    return most


def _squares(recorder):
    return [storage for storage in recorder.storages if storage.shape == (ROWS, 1, TOKENS, TOKENS)]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_before_4_53_a_mask_is_made_once_of_two_bytes_an_entry_and_five_while_it_is_made(attention):
    """4.45 modeling_qwen2.py:107-115: the causal mask's copy (2), its sum with the padding (2), where that is 0 (1)."""
    recorder = _trace(attention=attention, transformers=(4, 45))
    made = {storage.index for storage in _squares(recorder)}
    assert _most_bytes(recorder, made, "forward") == 5 * SQUARE
    assert _most_bytes(recorder, made, "backward") == 2 * SQUARE
    assert not [storage for storage in _squares(recorder) if ".layers." in storage.module]


def test_the_mask_is_as_wide_as_the_embeddings_and_autocast_narrows_it_in_each_layer():
    """4.45 modeling_qwen2.py:1042 `dtype = input_tensor.dtype`; torch autocast_mode.h lists SDPA."""
    recorder = _trace(transformers=(4, 45), precision="autocast")
    squares = _squares(recorder)
    kept = [storage for storage in squares if storage.died_phase != "forward"]
    assert {storage.size_bytes for storage in kept if ".layers." not in storage.module} == {4 * SQUARE}
    in_layers = [s for s in squares if s.module == "model.layers.1.self_attn" and s.phase == "forward"]
    assert [storage.size_bytes for storage in in_layers] == [2 * SQUARE]


@pytest.mark.parametrize(
    ("transformers", "padding", "copies"),
    [
        ((4, 45), True, 3),  # keys and values for every head, the query contiguous: modeling_qwen2.py:604-616
        ((4, 45), False, 2),  # without a mask the query stays as it is
        (
            (4, 48),
            False,
            4,
        ),  # integrations/sdpa_attention.py:30-42, always; flash lays its output out likewise
        ((5, 5), True, 2),
        ((5, 5), False, 0),  # the kernel takes grouped keys
    ],
)
def test_what_attention_copies_before_its_kernel(transformers, padding, copies):
    recorder = _trace(transformers=transformers, padding=padding)
    made = [
        storage.size_bytes
        for storage in recorder.storages
        if (storage.op, storage.phase, storage.module) == ("clone", "forward", "model.layers.0.self_attn")
    ]
    assert made == [QUERY_BYTES] * copies


def test_the_older_default_optimizer_takes_a_square_root_of_every_weights_second_moment_at_once():
    """torch optim/adamw.py _multi_tensor_adamw: `torch._foreach_sqrt(exp_avg_sqs)`, one group after another."""
    step = {"tokens": 16, "steps": 2, "padding": False}
    recorder = _trace(optimizer="adamw_torch", **step)
    _, at = recorder.peak("optimizer_step", 2)
    roots = [storage.size_bytes for storage in recorder.alive_at(at) if storage.op == "_foreach_sqrt"]
    layer = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * GROUPS * HEAD_DIM + 3 * HIDDEN * 64
    weights = 2 * 64 * HIDDEN + 2 * layer  # norms and biases are a group of their own, without decay
    assert sum(roots) == weights * 2


def test_the_closed_form_of_the_2024_stack_is_within_a_percent_in_every_phase():
    from dataclasses import replace
    from pathlib import Path

    from dpofit.hardware.cluster import Cluster
    from dpofit.hardware.gpus import find_gpu
    from dpofit.memory.job import STACK_2024, Job, Lengths
    from dpofit.memory.meter import phase_peaks
    from dpofit.memory.predict import predict
    from dpofit.models.known import find_model
    from dpofit.recipe.recipe import Recipe
    from dpofit.trace.job import trace_job

    model = replace(find_model("Qwen/Qwen2.5-0.5B"), layers=2)
    recipe = Recipe(
        name="r", source=Path("r.yaml"), settings={}, model=model.name, stage="dpo", finetuning="full", bf16=True,
        micro_batch=1, optim="adamw_torch",
    )  # fmt: skip
    job = Job(recipe, model, Cluster(find_gpu("a100-80g"), 1, 1), Lengths(1500, 500, 548, padded=True), STACK_2024)
    traced: dict[str, int] = {}
    for peak in phase_peaks(trace_job(job), frozenset({"gpu"})):
        if peak.step == 2:
            traced[peak.phase] = max(traced.get(peak.phase, 0), peak.size_bytes)
    predicted = predict(job).gpu.phases
    assert {phase: predicted[phase].size_bytes for phase in traced} == pytest.approx(traced, rel=0.01)
