"""The numbers of out-of-memory messages, and the tensors that have those sizes."""

from __future__ import annotations

from dpofit.doctor.oom import read_oom
from dpofit.doctor.tensors import Shape, which_tensor

GIB = 2**30
QWEN_72B = Shape(
    vocab=152_064, hidden=8_192, intermediate=29_568, heads=64, kv_heads=8, layers=80, head_dim=128,
    parameters=72_706_203_648,
)  # fmt: skip


def guesses(message: str, rows: int = 2, longest: int | None = None, world_size: int | None = None) -> list[str]:
    oom = read_oom(message)
    assert oom.wanted_bytes is not None and oom.wanted_within_bytes is not None
    return [
        str(g) for g in which_tensor(oom.wanted_bytes, oom.wanted_within_bytes, QWEN_72B, rows, longest, world_size)
    ]


def test_the_public_72b_report_failed_on_its_logits() -> None:
    """LlamaFactory#5838: 2 x 7,732 x 152,064 x 4 = 9,406,070,784 bytes = 8.76 GiB."""
    assert 2 * 7_732 * 152_064 * 4 == 9_406_070_784
    assert guesses("Tried to allocate 8.76 GiB.", longest=11_008)[0] == "fp32 logits: 2 x 7,732 x 152,064 x 4 bytes"


def test_the_print_stands_for_a_range_of_tokens() -> None:
    oom = read_oom("Tried to allocate 8.76 GiB.")
    guess = which_tensor(oom.wanted_bytes or 0, oom.wanted_within_bytes or (0, 0), QWEN_72B, 2, 11_008)[0]
    low, high = guess.tokens_per_row or (0, 0)
    for tokens in (low, high):  # rounded up to 2 MiB by the allocator, then printed with two decimals
        asked = -(-2 * tokens * 152_064 * 4 // (2 << 20)) * (2 << 20)
        assert f"{asked / GIB:.2f}" == "8.76"


def test_a_weight_is_told_before_any_number_of_tokens() -> None:
    """152,064 x 8,192 x 2 bytes = 2.32 GiB: gathering the head, or the embedding."""
    assert guesses("Tried to allocate 2.32 GiB.")[0] == "bf16 token embedding or output head: 152,064 x 8,192 x 2 bytes"


def test_the_optimizers_sub_group() -> None:
    assert "fp32 copy of a ZeRO-3 sub-group: 1e9 elements x 4 bytes" in guesses("Tried to allocate 3.73 GiB.")


def test_a_shard_of_all_parameters() -> None:
    """72,706,203,648 x 4 / 32 = 8.46 GiB."""
    assert guesses("Tried to allocate 8.46 GiB.", world_size=32)[0].startswith("fp32 shard of all parameters")


def test_no_more_tokens_than_a_row_can_have() -> None:
    assert not any("logits" in guess for guess in guesses("Tried to allocate 8.76 GiB.", longest=4_096))


def test_old_wording() -> None:
    oom = read_oom(
        "CUDA out of memory. Tried to allocate 4.00 GiB (GPU 3; 79.20 GiB total capacity; 50.00 GiB already allocated; "
        "1.20 GiB free; 76.00 GiB reserved in total by PyTorch)"
    )
    assert (oom.device, oom.total_bytes, oom.allocated_bytes) == (3, round(79.2 * GIB), 50 * GIB)
    assert oom.unallocated_bytes == 26 * GIB
    assert oom.fragmented


def test_torch_2_1_wording_lists_its_own_process_among_the_others() -> None:
    oom = read_oom(
        "CUDA out of memory. Tried to allocate 136.00 MiB. GPU 0 has a total capacty of 23.65 GiB of which 93.81 MiB "
        "is free. Process 11 has 398.00 MiB memory in use. Process 12 has 21.98 GiB memory in use. Of the allocated "
        "memory 21.51 GiB is allocated by PyTorch, and 2.30 MiB is reserved by PyTorch but unallocated."
    )
    assert oom.own_bytes == round(21.98 * GIB)
    assert oom.other_processes_bytes == (398 << 20,)
    assert oom.strangers_bytes == ()
    assert not oom.fragmented


def test_a_small_gap_is_not_fragmentation() -> None:
    """0.22 GiB of gaps on a full card of 29.5 GiB would have held the 130 MiB, and not the next request."""
    oom = read_oom(
        "NPU out of memory. Tried to allocate 130.00 MiB (NPU 0; 29.50 GiB total capacity; 28.45 GiB already allocated"
        "; 31.40 MiB free; 28.67 GiB reserved in total by PyTorch)"
    )
    assert not oom.fragmented


def test_a_cut_message_gives_what_it_has() -> None:
    oom = read_oom("CUDA out of memory. Tried to allocate 8.76 GiB. GPU 6 has a total ...")
    assert (oom.wanted_bytes, oom.device, oom.total_bytes, oom.free_bytes) == (round(8.76 * GIB), 6, None, None)


def test_no_numbers_at_all() -> None:
    assert read_oom("CUDA out of memory.").wanted_bytes is None
