"""The package as others install it: a wheel, built, installed and used."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_a_wheel_is_built_installed_and_used(tmp_path: Path) -> None:
    """It holds every file of the package, recipes and templates too, and the command works away from the sources."""
    sources = tmp_path / "sources"
    shutil.copytree(ROOT / "src", sources / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, sources / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-cache-dir"]
    built = subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path / "wheels", sources],
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = (tmp_path / "wheels").iterdir()
    files = {file.relative_to(sources / "src").as_posix() for file in (sources / "src" / "headstart").rglob("*.*")}
    assert files <= set(zipfile.ZipFile(wheel).namelist())

    installed = subprocess.run(
        [*pip, "install", "--no-deps", "--no-compile", "--target", tmp_path / "site", wheel], capture_output=True
    )
    assert installed.returncode == 0, installed.stderr
    use = "import headstart; from headstart.cli.app import app; print(headstart.__file__); app(['recipes'])"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    used = subprocess.run([sys.executable, "-c", use], env=environment, capture_output=True, text=True)
    assert used.returncode == 0, used.stderr
    assert used.stdout.startswith(str(tmp_path / "site")) and "quickstart" in used.stdout
