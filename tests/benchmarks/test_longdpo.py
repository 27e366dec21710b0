"""The FLOPs that benchmarks/longdpo.py counts are those of the sum written out."""

import pytest

pytestmark = pytest.mark.stack

LAYERS, HIDDEN, MLP, KV, VOCABULARY = 80, 8192, 29568, 1024, 152064  # Qwen2.5-72B
LAYER = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * KV + 3 * HIDDEN * MLP  # weights of q and o, k and v, the MLP
PROMPT, ANSWER = 8192, 1024
ROW = PROMPT + ANSWER


@pytest.mark.parametrize(
    ("pieces", "tokens", "scores", "head_positions"),
    [
        ((), 2 * ROW, 2 * ROW**2, 2 * ROW),
        (("answer_logps", "shared_prompt"), ROW + ANSWER, ROW**2 + ANSWER * ROW, 2 * ANSWER),
    ],
    ids=["stock", "long"],
)
def test_flops_of_72b_are_the_sum_written_out(pieces, tokens, scores, head_positions):
    from benchmarks.longdpo import Pair, flops_72b

    counted = flops_72b(Pair(PROMPT, ANSWER), pieces)
    # Two operations a weight and token; two products of scores by the heads' whole width.
    linear, attention, head = 2 * LAYER * LAYERS * tokens, 4 * HIDDEN * LAYERS * scores, 2 * VOCABULARY * HIDDEN
    assert counted["forward"] * 1e15 == pytest.approx(linear + attention + head * head_positions, rel=1e-3)
    # Forward, its recomputation, twice that for the gradients; attention's backward computes the scores once more.
    # The head is not checkpointed, but answer_logps recomputes it too.
    head_passes = 4 if pieces else 3
    training = 4 * linear + (2 + 2.5) * attention + head_passes * head * head_positions
    assert counted["training"] * 1e15 == pytest.approx(training, rel=1e-3)


def test_the_pieces_need_1_7_times_fewer_flops_a_pair_at_8k_and_1k():
    from benchmarks.longdpo import Pair, flops_72b, ratios

    pair = Pair(PROMPT, ANSWER)
    ratio = ratios(flops_72b(pair, ()), flops_72b(pair, ("answer_logps", "shared_prompt")))
    assert ratio["cached_reference_1_epoch"] >= 1.7  # the reference's pass paid for by this one epoch
