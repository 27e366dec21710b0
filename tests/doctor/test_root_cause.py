"""The first root cause, not the loudest; and nothing where nothing is known or the run went well."""

from __future__ import annotations

import pytest

from tests.doctor.conftest import ids, read

LAUNCH = (
    "[INFO|2026-01-02 10:00:00] llamafactory.launcher:144 >> Initializing 8 distributed tasks at: 127.0.0.1:29500\n"
)
BEGIN = "[INFO|trainer.py:1467] 2026-01-02 10:01:00,000 >> ***** Running training *****\n"
SAVE = "[INFO|trainer.py:3809] 2026-01-02 11:00:00,000 >> Saving model checkpoint to out/checkpoint-5\n"
DONE = "{'train_runtime': 10.2, 'train_samples_per_second': 1.0, 'epoch': 1.0}\n"
END = "\n" + DONE
OOM = (
    "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 8.76 GiB. GPU 0 has a total capacity of "
    "79.25 GiB of which 3.11 GiB is free. Including non-PyTorch memory, this process has 76.11 GiB memory in use. "
    "Of the allocated memory 70.00 GiB is allocated by PyTorch, and 4.00 GiB is reserved by PyTorch but unallocated.\n"
)
TIMEOUT = (
    "[rank4]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, NumelIn=466119168, "
    "NumelOut=466119168, Timeout(ms)=600000) ran for 600004 milliseconds before timing out.\n"
)
PEER = (
    "[rank9]: torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2251, remote process exited or "
    "there was a network error, NCCL version 2.21.5\n"
)
RESTART = "[default] Worker group FAILED. 3/3 attempts left; will restart worker group\n"
PORT = "RuntimeError: Address already in use\n"
SIGTERM = (
    "W0102 10:00:00.0 11 torch/distributed/elastic/agent/server/api.py:753] Received 15 death signal, shutting down\n"
)
SCANCEL = "slurmstepd: error: *** STEP 77.0 ON node-0 CANCELLED AT 2026-01-02T10:00:20 ***\n"
TIME_LIMIT = "slurmstepd: error: *** JOB 77 ON node-0 CANCELLED AT 2026-01-02T10:00:20 DUE TO TIME LIMIT ***\n"


def failed(code: int) -> str:
    return (
        "W0102 10:09:29.000000 11 torch/distributed/elastic/multiprocessing/api.py:897] Sending process 98 closing "
        "signal SIGTERM\nE0102 10:09:30.000000 11 torch/distributed/elastic/multiprocessing/api.py:869] failed "
        f"(exitcode: {code}) local_rank: 0 (pid: 99) of binary: /usr/bin/python\n"
    )


def at(step: int, steps: int = 100) -> str:
    return f"\r {step * 100 // steps:3d}%|####      | {step}/{steps} [10:00<90:00,  1.20s/it]"


RUNNING = LAUNCH + BEGIN + at(5) + "\n"

FIRST_CAUSE = {
    "Slurm's own word on memory, then its cancel": (
        "slurmstepd: error: Detected 3 oom_kill events in StepId=991.0. Some of the step tasks have been OOM Killed.\n"
        "srun: error: node-0: task 3: Out Of Memory\n" + SCANCEL,
        "memory.host-oom",
    ),
    "PBS and its wall time": ("=>> PBS: job killed: walltime 3612 exceeded limit 3600\n", "launch.time-limit"),
    "LSF and its memory limit": (
        "TERM_MEMLIMIT: job killed after reaching LSF memory usage limit.\nExited with exit code 137.\n",
        "memory.host-oom",
    ),
    "DeepSpeed's launcher after a SIGKILL": (
        "[launch.py:319:sigkill_handler] Killing subprocess 11\n"
        "[launch.py:325:sigkill_handler] ['python', '-u', 'train.py', '--local_rank=7'] exits with return code = -9\n",
        "memory.killed-9",
    ),
    "torchrun's summary alone": (
        "Root Cause (first observed failure):\n[0]:\n  rank      : 3 (local_rank: 3)\n  exitcode  : -9 (pid: 1234)\n"
        "  traceback : Signal 9 (SIGKILL) received by PID 1234\n",
        "memory.killed-9",
    ),
    "an OOM, then the others' time-out": (RUNNING + OOM + TIMEOUT + failed(1), "memory.gpu-oom"),
    "a time-out printed in the same minute before the OOM": (RUNNING + TIMEOUT + OOM + failed(1), "memory.gpu-oom"),
    "an OOM, then a rerun that finds its port taken by the rest": (
        RUNNING + OOM + failed(1) + LAUNCH + PORT + failed(1),
        "memory.gpu-oom",
    ),
    "an OOM, a restart, and then another error": (
        RUNNING + OOM + RESTART + BEGIN + at(8) + "\n" + PORT + failed(1),
        "memory.gpu-oom",
    ),
    "a save that dies after training ended well": (
        LAUNCH + BEGIN + at(100) + "\n" + DONE + SAVE + failed(-9),
        "memory.host-oom-save",
    ),
    "scancel, which also kills with -9": (RUNNING + SCANCEL + SIGTERM + failed(-9), "launch.cancelled"),
    "an OOM, a hang, then scancel": (RUNNING + OOM + SCANCEL, "memory.gpu-oom"),
    "the time limit at a save": (RUNNING + SAVE + TIME_LIMIT + failed(-9), "launch.time-limit"),
    "SIGTERM to the launcher": (RUNNING + SIGTERM + failed(-15), "launch.sigterm"),
    "kill -9 by hand in a step": (RUNNING + failed(-9), "memory.killed-9"),
    "Ctrl-C": (RUNNING + "^CTraceback (most recent call last):\nKeyboardInterrupt\n" + SIGTERM, "launch.interrupted"),
    "a lost connection alone": (RUNNING + PEER + failed(1), "launch.peer-lost"),
    "a time-out two hours before the time limit": (
        RUNNING + "[2026-01-02 08:00:00,000] step\n" + TIMEOUT + "[2026-01-02 10:00:00,000] step\n" + TIME_LIMIT,
        "launch.nccl-timeout",
    ),
}


@pytest.mark.parametrize(("log", "cause"), FIRST_CAUSE.values(), ids=FIRST_CAUSE.keys())
def test_first_cause(log: str, cause: str) -> None:
    assert ids(log)[0] == cause


NOTHING = {
    "a rank that comes before the master and tries again": (
        "[W socket.cpp:663] [c10d] The client socket has failed to connect to [node-0]:29500 (errno: 111 - Connection "
        "refused).\n" + RUNNING
    ),
    "no IPv6": (
        "[W socket.cpp:464] [c10d] The server socket has failed to bind to [::]:29500 (errno: 97 - Address family not "
        "supported by protocol).\n" + RUNNING
    ),
    "NCCL telling what it uses": "node-0:1:1 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>\n" + RUNNING,
    "an echo of the DeepSpeed file": '  "stage3_gather_16bit_weights_on_model_save": false}\n' + RUNNING,
    "pip's complaint": "ERROR: llamafactory 0.9.5 requires transformers<=5.6.0, but you have transformers 5.9.0.\n",
    "an empty log": "",
    "a run that failed, fixed and run again to its end": RUNNING + OOM + failed(1) + LAUNCH + BEGIN + at(99) + END,
    "a run that failed, run again and still going": RUNNING + OOM + failed(1) + LAUNCH + BEGIN + at(50),
    "an OOM that was caught: training went on": RUNNING + OOM + at(60),
    "an import that failed and was done without": (
        LAUNCH + "ModuleNotFoundError: No module named 'apex'\n" + BEGIN + at(5) + "\n" + failed(1)
    ),
    "an OOM that was retried to a good end": RUNNING + OOM + at(99) + "\n" + DONE,
    "a warning about OOM": RUNNING + "[WARNING] this may end in CUDA out of memory, less cutoff_len\n" + at(99) + END,
    "ranks hanging up after a good end": RUNNING + at(100) + "\n" + DONE + PEER,
    "exit code 1 and nothing else": RUNNING + failed(1),
    "an error nobody knows": RUNNING + "Traceback (most recent call last):\nZeroDivisionError: by zero\n" + failed(1),
    "torchrun killing survivors of an unknown error": (
        RUNNING
        + "[rank3]: ValueError: strange\nW0102 Unable to shutdown process 98 via Signals.SIGTERM, forcefully exiting "
        + "via Signals.SIGKILL\n"
        + failed(1)
        + "  exitcode  : -9 (pid: 98)\n"
    ),
    "a tracker losing its network": RUNNING + "wandb: ConnectionResetError(104, 'Connection reset by peer')\n" + at(50),
    "advice that only names failures": "If it dies with exitcode -9: the OOM killer. CUDA out of memory? Take less.\n",
    "bytes that are no text": bytes(range(256)) * 50,
    "a printed example of the data": (
        RUNNING
        + "[INFO|2026-01-02 10:00:00] llamafactory.data.loader:144 >> training example:\ninputs:\nuser: what is this?\n"
        + OOM[9:]
        + "KeyboardInterrupt\n[INFO|2026-01-02 10:00:01] llamafactory.model:144 >> Gradient checkpointing enabled.\n"
    ),
}  # fmt: skip


@pytest.mark.parametrize("log", NOTHING.values(), ids=NOTHING.keys())
def test_no_finding(log: str | bytes) -> None:
    assert ids(log) == []


def test_an_error_after_the_printed_example_counts() -> None:
    example = "llamafactory.data.loader:144 >> training example:\ninputs:\nhello\n"
    assert ids(RUNNING + example + "[INFO|2026-01-02 10:00:01] model:144 >> loaded\n" + OOM) == ["memory.gpu-oom"]
    assert ids(RUNNING + example + OOM) == ["memory.gpu-oom"]  # a line of a rank is no part of the example


def test_the_other_nodes_log_holds_the_cause() -> None:
    report = read(RUNNING + PEER + failed(1), RUNNING + OOM + failed(1))
    assert [finding.id for finding in report.findings] == ["memory.gpu-oom"]
    assert report.findings[0].evidence[0].where == "node-1.log:4"
    assert [line.where for line in report.followed] == ["node-0.log:4"]


def test_of_two_nodes_causes_the_earlier_is_first() -> None:
    late = "[2026-01-02 10:05:00,000] step\n" + OOM
    early = "[2026-01-02 10:04:00,000] step\nRuntimeError: CUDA error: uncorrectable ECC error encountered\n"
    assert ids(late, early) == ids(early, late) == ["launch.gpu-hardware"]


def test_the_kernels_word_in_another_file_settles_a_kill() -> None:
    kernel = "[Fri Jan  2 10:00:00 2026] Out of memory: Killed process 99 (python) total-vm:799050kB\n"
    assert ids(RUNNING + failed(-9), kernel) == ["memory.host-oom"]


def test_what_follows_is_listed_as_such() -> None:
    followed = [line.text.partition(":")[0] for line in read(RUNNING + OOM + TIMEOUT + PEER + failed(1)).followed]
    assert followed == ["launch.nccl-timeout", "launch.peer-lost"]


def test_the_step_is_named() -> None:
    assert (
        read(LAUNCH + BEGIN + at(37) + "\n" + OOM)
        .findings[0]
        .title.startswith("GPU 0 out of memory at step 37 of 100: 8.76 GiB wanted (card of 79.25 GiB")
    )


def test_a_killed_save_says_which_save_it_was() -> None:
    log = RUNNING + SAVE + at(6) + "\n" + SAVE + at(7) + "\n" + SAVE + failed(-9)
    assert "killed at save number 3" in read(log).findings[0].title


def test_a_kill_after_the_save_was_over_is_not_put_on_the_save() -> None:
    assert ids(RUNNING + SAVE + at(20) + "\n" + failed(-9)) == ["memory.killed-9"]


def test_ctrl_c_is_no_error() -> None:
    assert [finding.severity for finding in read(RUNNING + "KeyboardInterrupt\n").findings] == ["info"]
