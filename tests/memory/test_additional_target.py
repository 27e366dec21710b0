"""Whole modules trained beside adapters: copies of their own, in fp32, with the states of any trained weight."""

import pytest

from tests.memory.jobs import job, peaks, tiny

TABLE = 1000 * 64


def _planned(names, **shape):
    fields = {"finetuning": "lora", "gpus": 1, "nodes": 1, "prompt": 8, "response": 8}
    return job(tiny(**shape), additional_target=names, **fields)


@pytest.mark.parametrize(
    ("names", "elements"),
    [
        (("lm_head",), TABLE),
        (("embed_tokens", "lm_head"), 2 * TABLE),
        (("norm",), 64 * (2 * 4 + 1)),  # peft matches the end of a name: the layers' norms too
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_a_copy_is_trained_beside_the_frozen_weight(names, elements, tied):
    with_copies, without = (_planned(chosen, tie_word_embeddings=tied) for chosen in (names, ()))
    assert with_copies.trained_parameters - without.trained_parameters == elements
    more = sum(peaks(with_copies)["load"].breakdown.values()) - sum(peaks(without)["load"].breakdown.values())
    assert more == 4 * elements
    step, before = (peaks(planned)["optimizer_step"].breakdown for planned in (with_copies, without))
    assert step["optimizer"] - before["optimizer"] == 8 * elements


def test_trained_embeddings_make_the_residual_stream_fp32():
    plain, copied = (peaks(_planned(names))["loss"].breakdown["checkpoints"] for names in ((), ("embed_tokens",)))
    states = 2 * 16 * 64  # rows x tokens x hidden
    assert plain == 4 * states * 2
    assert copied == 5 * states * 4  # the last layer's output too, which the final norm saves as it is
