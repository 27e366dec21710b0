"""README says what dpofit says, and names only what exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_generated_tables_are_what_dpofit_says_today():
    command = [sys.executable, ROOT / "scripts" / "render_readme.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_link_and_script_named_exists():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    scripts = re.findall(r"bash (scripts/\S+\.sh)", README)
    assert len(links) > 5 and len(scripts) > 2
    assert [path for path in links + scripts if not (ROOT / path).exists()] == []


def test_every_command_shown_is_a_command():
    from dpofit.cli.app import COMMANDS

    shown = set(re.findall(r"^dpofit (\w+)", README, re.MULTILINE))
    assert len(shown) >= 5
    assert shown <= set(COMMANDS)
