#!/usr/bin/env python
"""Time and memory of `dpofit data` over a large synthetic file: is it one bounded pass?

    python benchmarks/data_stream.py [--pairs 1000000] [--exact] [--json FILE]

Writes a JSON lines file of that many pairs in a temporary folder, runs the whole command on it, and prints seconds,
megabytes a second and peak resident memory. `--exact` counts tokens with a tokenizer trained here. `--json` adds the
run to benchmarks/results/data-stream.json or another list of runs. From 200,000 to 1,000,000 pairs memory grows by what
is kept of a row (48 bytes of lengths and hashes) and by the sort at the end (about 80), not by the rows themselves.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

COMMON = (
    "the of and to in is that for it as was with be by on not he his "
    "but at are this have from or had an they which one you were her all she there "
    "would their we him been has when who will more no if out so said what up its about"
)
WORDS = COMMON.split()


def write_pairs(path: Path, pairs: int) -> None:
    """Distinct prompts of 20-200 words, answers of 10-150: about 1.3 kB a row."""
    choose = random.Random(0)
    pool = [" ".join(choose.choices(WORDS, k=200)) for _ in range(500)]

    def text(low: int, high: int) -> str:
        return choose.choice(pool)[: choose.randint(low, high) * 5]

    with path.open("w") as file:
        for number in range(pairs):
            row = {"instruction": f"{number}: {text(20, 200)}", "chosen": text(10, 150), "rejected": text(10, 150)}
            file.write(json.dumps(row) + "\n")


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([" ".join(WORDS)], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=1_000_000)
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pairs.jsonl"
        write_pairs(path, arguments.pairs)
        command = [_dpofit(), "data", str(path)]
        command += ["--json", "template=qwen", "cutoff_len=2048"]
        if arguments.exact:
            write_tokenizer(Path(folder))
            command.append(f"model_name_or_path={folder}")
        start = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - start
        assert done.returncode in (0, 1), done.stderr
        report = json.loads(done.stdout)
        size = path.stat().st_size
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = {
        "date": datetime.date.today().isoformat(),
        "pairs": report["pairs"],
        "file_mib": round(size / 2**20, 1),
        "tokens": report["lengths"]["basis"].split()[0].rstrip(":"),
        "seconds": round(seconds, 1),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "mib_per_second": round(size / 2**20 / seconds, 1),
        "pairs_per_second": round(report["pairs"] / seconds),
        "peak_rss_mib": round(usage.ru_maxrss / 1024, 1),
        "cores": os.cpu_count(),
    }
    print(json.dumps(result, indent=2))
    if arguments.json:
        kept = json.loads(arguments.json.read_text()) if arguments.json.exists() else {"runs": []}
        kept["runs"].append(result)
        arguments.json.write_text(json.dumps(kept, indent=2) + "\n")


def _dpofit() -> str:
    return str(Path(sys.executable).with_name("dpofit"))


if __name__ == "__main__":
    main()
