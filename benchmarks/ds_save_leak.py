"""Shows that DeepSpeed's ZeRO-3 consolidation keeps the whole 16-bit model alive after the caller has dropped it.

    pip install deepspeed torch
    DS_ACCELERATOR=cpu python benchmarks/ds_save_leak.py            # one CPU rank is enough
    DS_ACCELERATOR=cpu python benchmarks/ds_save_leak.py --remedy   # with the one-line remedy

Needs DeepSpeed and torch only. Prints resident memory after each of several consolidations whose result is dropped at
once; Python's cyclic collector is off, as it effectively is between two collections of its oldest generation.
"""

import argparse
import ctypes
import gc
import inspect
import os
import re
import socket
import textwrap
import types
import weakref
from pathlib import Path

ctypes.CDLL(None).mallopt(-3, 65536)  # M_MMAP_THRESHOLD: glibc gives every freed tensor back, so that memory tells
os.environ.setdefault("DS_ACCELERATOR", "cpu")
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = str(probe.getsockname()[1])
for name, value in {
    "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
}.items():  # fmt: skip
    os.environ.setdefault(name, value)

import deepspeed  # noqa: E402
import deepspeed.ops  # noqa: E402
import torch  # noqa: E402

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # don't compile an operator for this

MIB = 2**20


def resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmRSS in /proc/self/status")


def with_remedy(engine: deepspeed.DeepSpeedEngine) -> None:
    """Adds `del get_layer_state_dict` before the method returns; nothing else changes."""
    method = "_zero3_consolidated_16bit_state_dict"
    source = textwrap.dedent(inspect.getsource(getattr(deepspeed.DeepSpeedEngine, method)))
    fixed, count = re.subn(
        r"\n    return state_dict\n", "\n    del get_layer_state_dict\n    return state_dict\n", source
    )
    assert count == 1, "this DeepSpeed returns elsewhere; the remedy must be placed by hand"
    scope: dict = {}
    exec(compile(fixed, "remedy", "exec"), vars(inspect.getmodule(deepspeed.DeepSpeedEngine)), scope)
    setattr(engine, method, types.MethodType(scope[method], engine))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--remedy", action="store_true", help="break the cycle inside DeepSpeed's method")
    parser.add_argument("--saves", type=int, default=4)
    arguments = parser.parse_args()
    layers = [torch.nn.Linear(2048, 2048, bias=False) for _ in range(16)]
    model = torch.nn.Sequential(*layers).to(torch.bfloat16)
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    engine, *_ = deepspeed.initialize(model=model, config=config)
    if arguments.remedy:
        with_remedy(engine)
    model_mib = 16 * 2048 * 2048 * 2 / MIB
    print(f"deepspeed {deepspeed.__version__}, model {model_mib:.0f} MiB in bf16")
    engine._zero3_consolidated_16bit_state_dict()  # the first one also sets up what later ones reuse
    gc.collect()
    gc.disable()
    base = resident_bytes()
    alive: list[weakref.ref] = []
    for save in range(1, arguments.saves + 1):
        state = engine._zero3_consolidated_16bit_state_dict()
        alive += [weakref.ref(tensor) for tensor in state.values()]
        del state
        living = sum(reference() is not None for reference in alive)
        print(f"after save {save}: {(resident_bytes() - base) / MIB:6.0f} MiB more than before; {living} tensors alive")
    freed = gc.collect()
    print(f"after gc.collect() ({freed} objects): {(resident_bytes() - base) / MIB:.0f} MiB more than before")


if __name__ == "__main__":
    main()
