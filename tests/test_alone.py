"""The suite depends neither on the working folder and environment it starts in nor on earlier tests."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.forks import REPOSITORY, Forks

TRAPS = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "ACCELERATE_USE_FSDP": "true",
    "WANDB_MODE": "online",
    "HF_HUB_OFFLINE": "1",
    "COLUMNS": "20",
    "FORCE_COLOR": "1",
}
"""Variables that a launcher, a tracker or a terminal may have left."""
PROBE = """
import json, os
from pathlib import Path

def test_probe(tmp_path):
    found = {"traps": sorted(set(os.environ) & set(TRAPS)), "here": os.listdir(), "home": str(Path.home())}
    Path(WHERE).write_text(json.dumps(found))
"""


def test_a_test_finds_an_empty_folder_and_a_home_of_its_own(tmp_path: Path) -> None:
    import huggingface_hub.constants

    assert Path.cwd() == tmp_path and not list(tmp_path.iterdir())
    assert Path.home().name.startswith("headstart-tests-")
    assert Path(huggingface_hub.constants.HF_HOME).is_relative_to(Path.home()), "read once, when it is imported"
    assert Path(os.environ["XDG_CACHE_HOME"]).is_relative_to(Path.home())


@pytest.mark.parametrize("started_in", ["a folder with a run", "the repository"])
def test_tests_are_isolated(tmp_path: Path, forks: Forks, monkeypatch: pytest.MonkeyPatch, started_in: str) -> None:
    """Run the suite's own conftest beside a run and with a launcher's variables set."""
    path = tmp_path / "place"
    (path / "runs" / "quickstart" / "heads").mkdir(parents=True)
    (tmp_path / "home" / ".cache" / "headstart").mkdir(parents=True)
    (tmp_path / "test_probe.py").write_text(
        PROBE.replace("WHERE", repr(str(tmp_path / "found"))).replace("TRAPS", repr(sorted(TRAPS)))
    )
    options = ["-q", "-p", "no:cacheprovider", "-p", "tests.conftest", "--rootdir", str(tmp_path)]
    monkeypatch.chdir(path if started_in == "a folder with a run" else REPOSITORY)
    environment = {**os.environ, **TRAPS, "HOME": str(tmp_path / "home")}
    done = forks.run("-m", "pytest", *options, tmp_path / "test_probe.py", env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    found = (tmp_path / "found").read_text()
    assert '"traps": []' in found and '"here": []' in found
    assert str(tmp_path / "home") not in found


FAILING = """
import pytest
from headstart.decode.options import DecodeOptions
from headstart.decode.loop import DecodeLoop
from tests.decode.drafters import IdleDrafter

class Failing(IdleDrafter):
    max_nodes = 4

    def propose(self, *_):
        raise ValueError("no drafts today")

def decode(target):
    return DecodeLoop(target, Failing()).generate([[3, 9]], DecodeOptions(max_new_tokens=4))[0]

@pytest.fixture(scope="module")
def made(tiny_target):
    return decode(tiny_target)

def test_in_a_test(tiny_target):
    assert len(decode(tiny_target).tokens) == 4

def test_in_a_fixture(made):
    assert made.tokens

@pytest.mark.drafter_fails
def test_on_purpose(tiny_target):
    assert decode(tiny_target).drafter_error == "ValueError: no drafts today"
"""


def test_a_drafter_that_raises_fails_its_test(tmp_path: Path, forks: Forks) -> None:
    (tmp_path / "test_failing.py").write_text(FAILING)
    options = ["-q", "-p", "no:cacheprovider", "-p", "tests.conftest", "--rootdir", str(tmp_path)]
    done = forks.run("-m", "pytest", *options, "-rA", "-W", "ignore", tmp_path / "test_failing.py")
    told = re.findall(r"^(PASSED|FAILED|ERROR) .*::(\w+)", done.stdout, re.MULTILINE)
    expected = {("PASSED", "test_on_purpose"), ("FAILED", "test_in_a_test"), ("ERROR", "test_in_a_fixture")}
    assert set(told) == expected, done.stdout
