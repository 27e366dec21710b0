"""What the tracer says about steps small enough to work out by hand, and about jobs."""

from dataclasses import replace
from pathlib import Path

import pytest

pytestmark = pytest.mark.stack

ROWS, TOKENS, VOCABULARY, HIDDEN = 2, 64, 4096, 32

STEP = {
    "model_type": "qwen2", "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 64, "layers": 2,
    "heads": 2, "kv_heads": 1, "head_dim": 16, "tied_embeddings": False, "rows": ROWS, "tokens": TOKENS,
    "precision": "pure_bf16", "optimizer": "",
}  # fmt: skip


def _trace(**changes):
    from dpofit.trace.request import TraceRequest
    from dpofit.trace.step import trace_step

    return trace_step(TraceRequest(**(STEP | changes))).recorder


def _logit_bytes_at_peak(recorder, phase):
    """Bytes per vocabulary entry of every token, of what is vocabulary-wide at the phase's peak."""
    _, at = recorder.peak(phase)
    wide = [
        s for s in recorder.alive_at(at) if (VOCABULARY in s.shape[-1:] and len(s.shape) > 1) or s.op == "_log_softmax"
    ]
    wide = [s for s in wide if s.shape != (VOCABULARY, HIDDEN)]
    return sum(s.size_bytes for s in wide) / (ROWS * TOKENS * VOCABULARY)


def test_dpo_holds_five_fp32_logits_in_the_reference_forward():
    recorder = _trace()
    # policy logits and log-softmax, the reference's logits, its log-softmax, and the kernel's copy; T-1 of T for three
    assert _logit_bytes_at_peak(recorder, "reference_forward") == pytest.approx(8 + 12 * (TOKENS - 1) / TOKENS)
    assert recorder.marks[recorder.peak()[1]].phase == "reference_forward"


def test_without_a_reference_dpo_holds_three():
    recorder = _trace(pref_loss="orpo")
    assert _logit_bytes_at_peak(recorder, "forward") == pytest.approx(4 + 8 * (TOKENS - 1) / TOKENS)
    assert not recorder.peak("reference_forward")[0]


@pytest.mark.parametrize(
    ("transformers", "bytes_per_entry"),
    [
        ((5, 5), 2 + 4 + 4),
        ((4, 49), 2 + 4 + 4),
        ((4, 48), 2 + 4 + 8 * (TOKENS - 1) / TOKENS),
        ((4, 45), 4 + 8 * (TOKENS - 1) / TOKENS),
    ],
)
def test_the_sft_loss_costs_what_the_transformers_of_the_stack_makes_it_cost(transformers, bytes_per_entry):
    recorder = _trace(stage="sft", transformers=transformers)
    assert _logit_bytes_at_peak(recorder, "forward") == pytest.approx(bytes_per_entry)


def test_liger_leaves_no_logits_in_sft_and_all_of_them_in_dpo():
    assert _logit_bytes_at_peak(_trace(stage="sft", liger=True), "forward") < 1
    assert _logit_bytes_at_peak(_trace(liger=True), "reference_forward") == pytest.approx(8 + 12 * 63 / 64)


def test_unsloth_gc_puts_one_block_a_layer_into_pinned_host_memory():
    recorder = _trace(checkpointing="unsloth")
    assert recorder.peak(space="host_pinned")[0] == 2 * ROWS * TOKENS * HIDDEN * 2
    assert _trace().peak(space="host_pinned")[0] == 0


def test_a_padding_mask_costs_a_byte_an_entry_and_its_bias_two_in_each_layer():
    recorder = _trace(tokens=512, vocab_size=64)
    square = [s for s in recorder.storages if s.shape == (ROWS, 1, 512, 512)]
    assert {s.size_bytes for s in square if s.dtype == "bool"} == {ROWS * 512 * 512}
    assert {s.size_bytes for s in square if s.dtype == "bfloat16"} == {ROWS * 512 * 512 * 2}
    assert not [s for s in _trace(tokens=512, vocab_size=64, padding=False).storages if s.shape[-2:] == (512, 512)]


def test_everything_but_weights_gradients_and_optimizer_states_is_gone_after_a_step():
    recorder = _trace(optimizer="adamw_torch_fused", steps=2)
    left = [s for s in recorder.storages if s.died is None and s.step == 2 and s.size_bytes > 64]
    assert left == []


@pytest.fixture
def job():
    from dpofit.hardware.cluster import Cluster
    from dpofit.hardware.gpus import find_gpu
    from dpofit.memory.job import Job, Lengths, Stack
    from dpofit.models.known import find_model
    from dpofit.recipe.recipe import Recipe

    recipe = Recipe(
        name="r", source=Path("r.yaml"), settings={}, model="Qwen/Qwen2.5-0.5B", stage="dpo", finetuning="full",
        micro_batch=1, pure_bf16=True, optim="adamw_torch_fused",
    )  # fmt: skip
    shape = replace(find_model("Qwen/Qwen2.5-0.5B"), layers=2)
    cluster = Cluster(find_gpu("a100-80g"), nodes=1, gpus_per_node=1)
    return Job(recipe, shape, cluster, Lengths(64, 64, 64, padded=True), Stack())


def test_a_job_becomes_two_steps_whose_every_free_matches_an_allocation(job):
    from dpofit.trace.job import trace_job

    program = trace_job(job)
    assert [p.name for p in program.phases if p.step == 2] == [
        "forward", "reference_forward", "loss", "backward", "optimizer_step",
    ]  # fmt: skip
    alive = {}
    for _, tag, event in program.events():
        if event.size_bytes > 0:
            assert tag not in alive
            alive[tag] = event.size_bytes
        else:
            assert alive.pop(tag) == -event.size_bytes


def test_what_cannot_be_traced_is_refused_by_name_all_at_once(job):
    from dpofit.errors import BadInput
    from dpofit.trace.job import trace_job

    odd = replace(job, recipe=replace(job.recipe, optim="paged_adamw_8bit", fp16=True, bf16=False, use_unsloth=True))
    with pytest.raises(BadInput) as refused:
        trace_job(odd)
    assert {problem.key for problem in refused.value.problems} == {"optim", "fp16", "use_unsloth"}


@pytest.mark.parametrize("suffix", [".html", ".png"])
def test_the_timeline_names_the_peak(job, tmp_path, suffix):
    from dpofit.trace.job import trace_job
    from dpofit.trace.timeline import Timeline, draw_timeline

    program = trace_job(job)
    path = tmp_path / f"out{suffix}"
    draw_timeline(program, path, "a <job>")
    timeline = Timeline(program)
    size, category, _ = timeline.alive_at_peak[0]
    assert (size, category) == (151936 * 896 * 2, "weights")  # the tied embedding; then fp32 logits of 2 x 128 tokens
    assert timeline.alive_at_peak[1][:2] in {(151936 * 896 * 2, name) for name in ("reference_weights", "optimizer")}
    assert path.stat().st_size > 10_000
    if suffix == ".html":
        text = path.read_text()
        assert "a &lt;job&gt;" in text and f"peak {timeline.peak_bytes / 2**30:.2f} GiB" in text
