"""A reader that has seen enough (`dpofit … | head`) is no "no"."""

import subprocess
import sys

COMMAND = "from dpofit.cli.app import main; main(['show', 'qwen2.5-7b-dpo/full-z3', '--json'])"


def test_a_closed_pipe_is_a_yes():
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", COMMAND], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.close()
    assert (process.stderr.read(), process.wait()) == ("", 0)
    process.stderr.close()


def test_python_dash_m_is_the_same_command() -> None:
    done = subprocess.run([sys.executable, "-m", "dpofit", "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()[0]) == (0, "dpofit")
