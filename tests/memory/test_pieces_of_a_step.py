"""What each long-context piece takes away, worked out by hand; and that they only ever take away."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dpofit.errors import BadInput
from dpofit.memory.explain import explain
from dpofit.memory.host import host_peak
from dpofit.memory.limits import longest_prompt
from dpofit.memory.predict import predict
from dpofit.memory.scope import check_scope
from dpofit.memory.speed import forward_flops, reference_forwards, step_time
from dpofit.memory.step import build_program, plan_steps
from dpofit.models.known import find_model
from dpofit.recipe.long_context import PIECES
from dpofit.recipe.recipe import ZeroConfig
from dpofit.train.longdpo import CHUNK_POSITIONS, SLAB_BYTES, TILE_TOKENS
from tests.memory.jobs import job, peaks

GIB = 2**30
Z3 = ZeroConfig(
    "z3", 3, overlap_comm=True, reduce_bucket_size="auto", prefetch_bucket_size="auto",
    param_persistence_threshold="auto", gather_16bit_weights_on_save=True,
)  # fmt: skip
VOCABULARY, HIDDEN, INNER, LAYERS = 152_064, 8192, 29_568, 80
ROW = 8192 + 1024


def long(*pieces: str, **changes):
    return job(zero=Z3, liger=True, long_context=frozenset(pieces), **changes)


def logits(planned, phase: str) -> int:
    return peaks(planned)[phase].breakdown.get("logits", 0)


def test_the_head_on_answers_alone_leaves_chunks_where_stock_has_whole_rows_of_logits() -> None:
    # stock: fp32 logits and log-softmax of the policy, three of the reference's at once, one token less in three
    full = 2 * ROW * VOCABULARY * 4
    assert logits(long(), "reference_forward") == pytest.approx(5 * full, rel=1e-3)
    chunk = CHUNK_POSITIONS * VOCABULARY
    assert logits(long("answer_logps"), "reference_forward") <= 10 * chunk  # 0.73 GiB at most for 52.2
    for phase in ("forward", "reference_forward", "loss"):
        assert logits(long("answer_logps"), phase) <= 10 * chunk


def test_what_answers_cost_follows_answers_not_prompts() -> None:
    short, longer = (logits(long("answer_logps", prompt=prompt), "forward") for prompt in (2048, 65_536))
    assert short == longer


def test_a_shared_row_holds_prompt_chosen_and_rejected_without_padding() -> None:
    planned = long("shared_prompt", prompt=8191, response=1000)
    assert (planned.rows, planned.row_tokens) == (1, 8191 + 2 * 1000)
    assert (job(prompt=8191, response=1000).rows, job(prompt=8191, response=1000).row_tokens) == (2, 9192)
    assert planned.layer_spec(planned.rows, trained=True).attention == "flash"  # no mask, padded or not
    # 80 checkpoints of one row of 10,191 tokens where stock has two of 9,192
    saved = peaks(planned)["forward"].breakdown["checkpoints"]
    assert saved == pytest.approx((LAYERS + 1) * 10_191 * HIDDEN * 2, rel=0.02)


def test_a_cached_reference_leaves_no_second_model_and_no_forward_in_a_step() -> None:
    with_it, without = peaks(long()), peaks(long("cached_reference"))
    assert with_it["init"].breakdown["reference"] == pytest.approx(72_706_203_648 * 2 / 32, rel=1e-6)
    assert "reference" not in without["init"].breakdown
    cached = long("cached_reference")
    phases = build_program(cached, plan_steps(cached)).phases
    assert "reference_forward" not in {phase.name for phase in phases if phase.step}
    before = [phase.name for phase in phases if not phase.step]
    assert before == ["load", "init", "reference_forward"]  # one pass over the data, by the policy


def test_a_tiled_mlp_stops_growing_with_length() -> None:
    """Stock's MLP at its peak holds 8 f bytes a token with Liger (gate, up, product, its gradient); tiles hold that of
    4,096 tokens, fp32 sums of the weights' gradients and one tile's bf16 ones."""
    everything = [piece for piece in PIECES if piece != "tiled_mlp"]
    grows = [peaks(long(*everything, prompt=p))["backward"].size_bytes for p in (32_768, 65_536)]
    tiled = [peaks(long(*PIECES, prompt=p))["backward"].size_bytes for p in (32_768, 65_536)]
    saved = [one - other for one, other in zip(grows, tiled, strict=True)]
    assert saved[1] - saved[0] == pytest.approx(32_768 * 8 * INNER, rel=0.1)
    weights = 3 * HIDDEN * INNER
    assert peaks(long("tiled_mlp"))["backward"].size_bytes > 0 and TILE_TOKENS == 4096
    assert peaks(long(*PIECES, prompt=65_536))["backward"].breakdown["gradients"] >= weights * (4 + 2)


def test_offloaded_inputs_lie_one_after_the_other_where_unsloth_gc_rounds_each_to_a_power_of_two() -> None:
    row = 2 * ROW * HIDDEN * 2  # 302 MB, a layer's input
    assert row == 301_989_888
    ours, unsloth = long("offload_checkpoints", saves=False), job(zero=Z3, use_unsloth_gc=True, saves=False)
    pinned = [host_peak(one, build_program(one, plan_steps(one)), ()).pinned_bytes for one in (ours, unsloth)]
    assert pinned[1] == 8 * LAYERS * 512 * 2**20  # 320 GiB a node
    assert pinned[0] == 8 * -(-LAYERS * row // SLAB_BYTES) * SLAB_BYTES  # 180 GiB
    assert (pinned[0] / GIB, pinned[1] / GIB) == (180.0, 320.0)


def test_shorter_batches_pin_nothing_more_in_slabs() -> None:
    ours = long("offload_checkpoints")
    program = build_program(ours, plan_steps(ours))
    assert host_peak(ours, program, (1024, 4096)) == host_peak(ours, program, ())


def test_a_host_of_1_tb_binds_later_with_slabs_than_with_unsloth_gc() -> None:
    pieces = frozenset(PIECES) - {"offload_checkpoints"}
    ours = job("Qwen/Qwen2.5-72B", zero=Z3, liger=True, host_gib=1000, long_context=frozenset(PIECES), saves=False)
    unsloth = replace(ours, recipe=replace(ours.recipe, long_context=pieces, use_unsloth_gc=True))
    limits = [longest_prompt(one) for one in (ours, unsloth)]
    assert [limit.binding for limit in limits] == ["host", "host"]
    assert limits[0].prompt_tokens > 1.1 * limits[1].prompt_tokens


def test_46k_fits_32_cards_of_80_gb_without_sequence_parallelism() -> None:
    """360-LLaMA-Factory needs 8 GPUs a sequence for it, with offload."""
    planned = long(*PIECES, prompt=46_000, host_gib=1000, gpu="a800-80g")
    assert predict(planned).verdict == "fits"
    assert predict(replace(planned, recipe=replace(planned.recipe, long_context=frozenset()))).verdict == "oom"


@pytest.mark.parametrize("finetuning", ["full", "lora"])
@pytest.mark.parametrize("piece", PIECES)
def test_no_piece_alone_makes_the_peak_higher(piece: str, finetuning: str) -> None:
    planned = [job(zero=Z3, finetuning=finetuning, long_context=frozenset(p)) for p in ((), (piece,))]
    stock, with_it = (max(peak.size_bytes for peak in peaks(one).values()) for one in planned)
    assert with_it <= stock


@pytest.mark.parametrize("pieces", [(piece,) for piece in PIECES] + [PIECES])
def test_longer_prompts_never_cost_less_and_every_free_frees_something(pieces: tuple[str, ...]) -> None:
    sizes = []
    for prompt in (1000, 3000, 5000, 20_000):  # on both sides of one tile and of one slab
        planned = long(*pieces, prompt=prompt, evaluates=True)
        build_program(planned, plan_steps(planned)).check()
        sizes.append(max(peak.size_bytes for peak in peaks(planned).values()))
    assert sizes == sorted(sizes)


def test_a_step_of_any_length_can_be_laid_on_the_plan_of_another() -> None:
    from dpofit.memory.limits import at_prompt
    from dpofit.memory.step import steady_step

    plan = plan_steps(long(*PIECES, prompt=100))
    for prompt in (8, 4096, 40_000):
        steady_step(at_prompt(long(*PIECES), prompt), plan)


def test_flops_of_a_shared_prompt_and_a_cached_reference_at_8k_and_1k() -> None:
    stock, ours = long(), long("shared_prompt", "cached_reference")
    # 2 x 9,216 tokens against 10,240 through every matrix; attention looks at fewer pairs too
    assert 1.7 < forward_flops(stock) / forward_flops(ours) < 1.9
    assert reference_forwards(stock) == 1.0
    three = replace(ours, recipe=replace(ours.recipe, settings={"num_train_epochs": 3.0}))
    assert reference_forwards(three) == pytest.approx(1 / 3)
    assert step_time(three).compute_s < step_time(stock).compute_s / 1.7


def test_the_sums_of_explain_speak_of_the_pieces() -> None:
    said = {line.what: line.arithmetic for line in explain(predict(long(*PIECES, host_gib=1000)))}
    assert "one after the other in pinned slabs of 64 MiB" in said["host offload_checkpoints"]


def test_a_family_that_the_pieces_do_not_know_is_refused_by_name() -> None:
    known = long(*PIECES)
    with pytest.raises(BadInput, match="known: llama, mistral, qwen2, qwen3"):
        check_scope(known.recipe, replace(known.model, model_type="qwen"))
    sliding = replace(find_model("Qwen/Qwen2.5-7B"), sliding_window=4096)
    with pytest.raises(BadInput, match="sliding window of 4,096 tokens"):
        check_scope(known.recipe, sliding)
    check_scope(replace(known.recipe, long_context=frozenset({"offload_checkpoints"})), sliding)
