"""`python -m benchmarks.measure_gpu`, from the repository's root, with the training stack installed."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from . import __doc__ as usage
from .jobs import JOBS
from .results import FOLDER
from .runner import read_card, run_jobs


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=usage, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="jobs; all when none is named")
    parser.add_argument("--list", action="store_true", help="print the jobs")
    parser.add_argument("--budget", type=float, default=570.0, metavar="SECONDS", help="begin no job after (570)")
    parser.add_argument("--again", action="store_true", help="also what has a result already")
    parser.add_argument("--results", type=Path, default=FOLDER, metavar="DIR", help="benchmarks/results/gpu")
    parser.add_argument("--work", type=Path, metavar="DIR", help="for weights (up to 40 GB) and logs, which stay there")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.names) - {job.name for job in JOBS})
    if unknown:
        parser.error(f"no such job: {', '.join(unknown)}; see --list")
    jobs = [job for job in JOBS if not options.names or job.name in options.names]
    if options.list:
        for job in jobs:
            print(f"{job.name}  {job.model}{f', {job.layers} layers' if job.layers else ''}, rows of {job.rows}")
        return 0
    if read_card() is None:
        print("error: no CUDA card here: nothing to measure", file=sys.stderr)
        return 2
    if options.work is not None:
        options.work.mkdir(parents=True, exist_ok=True)
        return 0 if run_jobs(jobs, options.results, options.work.resolve(), options.budget, options.again) else 1
    with tempfile.TemporaryDirectory(prefix="dpofit-gpu-") as work:
        return 0 if run_jobs(jobs, options.results, Path(work), options.budget, options.again) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
