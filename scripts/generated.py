"""What the scripts that generate files have in common: tables put into a page, files written or checked."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path


def parser(about: str | None) -> argparse.ArgumentParser:
    """The options all of them have."""
    options = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--check", action="store_true", help="compare, write nothing; exit 1 if a file is out of date")
    return options


def write_or_check(pages: Mapping[Path, str], check: bool) -> int:
    """The exit code; `pages` are whole texts."""
    old = [path for path, text in pages.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    if check:
        for path in old:
            print(f"{path} is out of date: run {sys.argv[0]}", file=sys.stderr)
        return 1 if old else 0
    for path in old:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(pages[path], encoding="utf-8")
    return 0


def with_tables(page: Path, tables: Mapping[str, Callable[[], str]]) -> str:
    """The page's text with each table between `<!-- generated: NAME -->` and `<!-- end -->` as it is today."""
    text = page.read_text(encoding="utf-8")
    for name, table in tables.items():
        opening, closing = f"<!-- generated: {name} -->\n", "<!-- end -->"
        before, found, rest = text.partition(opening)
        if not found or opening in rest:
            raise SystemExit(f"{page} must have one place for the table {name}")
        text = before + opening + table() + "\n" + rest[rest.index(closing) :]
    return text
