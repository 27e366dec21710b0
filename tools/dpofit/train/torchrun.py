"""torchrun itself, except that what it learns about ranks that failed is also written where dpofit finds it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from dpofit.train.failures import Failed, note_failures


def main() -> None:
    """`python -m dpofit.train.torchrun ARGUMENTS` is `torchrun ARGUMENTS`; `DPOFIT_STATE` names the folder."""
    from dpofit.train.entry import die_with_parent

    if "DPOFIT_STATE" in os.environ:
        die_with_parent()
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        run.main(sys.argv[1:])
    except ChildFailedError as error:
        _write(error)
        raise SystemExit(1) from None
    except Exception as error:  # rendezvous failures and the like: one line, the traceback is torch's
        print(f"torchrun: {type(error).__name__}: {error}", file=sys.stderr)
        raise SystemExit(1) from None


def _write(error: Any) -> None:
    state = os.environ.get("DPOFIT_STATE")
    if state is None:
        return
    failed = [
        Failed(rank, f.local_rank, f.pid, f.exitcode, int(f.timestamp), _text(f.message))
        for rank, f in error.failures.items()
    ]
    note_failures(Path(state), failed)


def _text(message: Any) -> str:
    """A rank's own words: `Type: text` of its exception, or torch's "Signal 9 (SIGKILL) received by PID …"."""
    return str(message.get("message", message)) if isinstance(message, dict) else str(message)


if __name__ == "__main__":
    main()
