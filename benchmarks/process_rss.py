"""Anonymous memory of one training process before any model: what PROCESS_BYTES in tools/dpofit/memory/host.py is.

    python benchmarks/process_rss.py [OUT.json]

Needs the training stack (requirements.txt) on Linux. Imports what `llamafactory-cli train` imports for DPO under
DeepSpeed, opens a gloo group of one rank, and reads RssAnon from /proc/self/status. On a CUDA machine the driver's host
memory comes on top once a context exists; it is not in this figure.
"""

from __future__ import annotations

import importlib.metadata as metadata
import json
import os
import platform
import socket
import sys
from datetime import UTC, datetime
from pathlib import Path

PACKAGES = ("torch", "llamafactory", "transformers", "trl", "peft", "accelerate", "deepspeed", "datasets")


def rss_anon_bytes() -> int:
    """Resident anonymous memory of this process."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no RssAnon")


def main() -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    readings = {"python": rss_anon_bytes()}
    import torch

    readings["torch"] = rss_anon_bytes()
    import deepspeed  # noqa: F401
    import llamafactory.train.dpo.workflow
    import llamafactory.train.tuner  # noqa: F401

    readings["llamafactory and deepspeed"] = rss_anon_bytes()
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    readings["process group"] = rss_anon_bytes()
    torch.distributed.destroy_process_group()
    result = {
        "what": "RssAnon of one training process before any model, bytes",
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "versions": {name: metadata.version(name).partition("+")[0] for name in PACKAGES},
        "rss_anon_bytes": readings,
    }
    text = json.dumps(result, indent=2) + "\n"
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text, encoding="utf-8")
    print(text, end="")


if __name__ == "__main__":
    main()
