"""An installed dpofit has its catalogue with it, without the checkout."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a wheel built from this checkout unpacks to."""
    source = tmp_path_factory.mktemp("source")
    for name in ("tools", "recipes", "deepspeed"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", source)
    (source / "README.md").touch()  # the package index's description; nothing here reads it
    out, unpacked = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("site")
    build = "import sys, setuptools.build_meta as backend; backend.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(out)], cwd=source, check=True, capture_output=True, timeout=120)
    [wheel] = out.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(unpacked)
    return unpacked


def run(installed: Path, code: str) -> str:
    """`code` by a Python that finds the installed package first, elsewhere than the checkout."""
    program = f"import sys; sys.path.insert(0, {str(installed)!r})\n{code}"
    done = subprocess.run([sys.executable, "-c", program], cwd=installed, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_catalogue_is_the_packages_own(installed: Path) -> None:
    out = run(installed, "from dpofit.recipe.catalogue import catalogue_root; print(catalogue_root())")
    assert Path(out.strip()) == installed / "dpofit/catalogue"


def test_every_file_of_the_checkouts_catalogue_is_in_it(installed: Path) -> None:
    for folder in ("recipes", "deepspeed"):
        files = {path.relative_to(ROOT) for path in (ROOT / folder).rglob("*") if path.is_file()}
        shipped = installed / "dpofit/catalogue"
        assert {path.relative_to(shipped) for path in (shipped / folder).rglob("*") if path.is_file()} == files


def test_list_and_copy_work_from_it(installed: Path, tmp_path: Path) -> None:
    out = run(installed, "from dpofit.cli.app import main; main(['list', '--json'])")
    assert len(json.loads(out)["recipes"]) >= 21
    run(installed, f"from dpofit.cli.app import main; main(['copy', 'lora-z3', {str(tmp_path / 'run')!r}])")
    assert (tmp_path / "run/ds.json").read_bytes() == (ROOT / "deepspeed/z3.json").read_bytes()
