"""How seconds are kept: beside the day, the interpreter, the cores and the load of the machine that took them."""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path
from typing import Any


def write(path: Path, **rows: Any) -> None:
    """`rows` under their names."""
    document = {
        "date": time.strftime("%Y-%m-%d"), "python": platform.python_version(), "cores": os.cpu_count(),
        "load_at_end": round(os.getloadavg()[0], 1), **rows,
    }  # fmt: skip
    path.write_text(json.dumps(document, indent=2) + "\n")
