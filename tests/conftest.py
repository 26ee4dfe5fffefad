"""Shared fixtures: a tiny target with a real tokenizer, the same saved as a folder, and a Hub.

Tests depend on no home folder, cache, working folder or variable of whoever starts them: the session has an empty home
of its own, with one cache for all of it, and each test runs in its own empty folder.
"""

from __future__ import annotations

import gc
import os
import site
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from headstart.model.model import Target
    from tests.forks import Forks
    from tests.hub.client import Client
    from tests.hub.fake_hub import FakeHub
    from tests.standin import StandIn

FOREIGN = (
    *("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "GROUP_", "ROLE_", "TORCHELASTIC_", "ACCELERATE_", "FSDP_"),
    *("SLURM_", "OMPI_", "MPI_", "MV2_"),
    *("HF_", "HUGGING", "TRANSFORMERS_", "WANDB_", "TENSORBOARD_", "XDG_", "MPL"),
    *("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "PY_COLORS", "TTY_", "GITHUB_ACTIONS"),
)
"""How variables begin that a launcher, a tracker, a cache or a terminal leaves to the tests."""

_HOME = tempfile.TemporaryDirectory(prefix="headstart-tests-", ignore_cleanup_errors=True)


def _settle(home: Path) -> None:
    """Begin with an empty home. Libraries read it once, when they are imported: the fixtures import them."""
    os.environ["PYTHONUSERBASE"] = site.getuserbase()  # packages may lie in the real home
    for name in [name for name in os.environ if name.startswith(FOREIGN)]:
        del os.environ[name]
    os.environ.update(HOME=str(home), XDG_CACHE_HOME=str(home / ".cache"), HF_HOME=str(home / ".cache" / "huggingface"))


_settle(Path(_HOME.name))

if "OMP_NUM_THREADS" in os.environ:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def pytest_collection_finish() -> None:
    """What imports and tests hold for good is not looked through whenever a test, or memory that ends, has garbage
    collected: some 0.3 s each time."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _away(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fixtures of whole modules are made in an empty folder too."""
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("away"))
    yield
    os.chdir(before)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test writes without saying where lies in its own folder, and what it finds there is its own."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _threads_stay() -> Iterator[None]:
    """However many threads a test gives to torch, the next one has as many as before."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def _guard() -> Iterator[Any]:
    """Decoding goes on plainly when a drafter raises, with the right words: a test would pass. Here it is raised."""
    from headstart.decode import loop

    with pytest.MonkeyPatch.context() as patched:
        caught = loop.DRAFTER_ERRORS
        patched.setattr(loop, "DRAFTER_ERRORS", ())
        yield caught


@pytest.fixture(autouse=True)
def _drafters_may_fail(request: pytest.FixtureRequest, _guard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a test that says so, what drafters raise is caught as in use."""
    if request.node.get_closest_marker("drafter_fails"):
        monkeypatch.setattr("headstart.decode.loop.DRAFTER_ERRORS", _guard)


@pytest.fixture(scope="session")
def tiny_target() -> Target:
    """A random float32 Llama of 3 layers with a byte-level tokenizer and a ChatML template."""
    from headstart.model.model import Target
    from tests.tiny import tiny_model, tiny_tokenizer

    tokenizer = tiny_tokenizer()
    model = tiny_model("llama", vocab_size=len(tokenizer), max_length=1024)
    return Target(model, tokenizer, "tiny")


@pytest.fixture(scope="session")
def tiny_target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model and tokenizer of `tiny_target`, saved so that `load_target(str(folder))` reads them."""
    from tests.tiny import save_tiny_target

    folder = tmp_path_factory.mktemp("tiny") / "target"
    save_tiny_target(folder)
    return folder


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """Commands in processes of their own, without the seconds of their imports."""
    from tests.forks import Forks

    made = Forks(tmp_path_factory.mktemp("forks"))
    yield made
    made.close()


@pytest.fixture
def device() -> Iterator[StandIn]:
    """A device that says it is a GPU."""
    from tests.standin import StandIn

    with StandIn() as made:
        yield made


@pytest.fixture(scope="session")
def hub() -> Iterator[FakeHub]:
    """A fake Hub over HTTP."""
    from tests.hub.fake_hub import FakeHub

    hub = FakeHub()
    yield hub
    hub.stop()


@pytest.fixture(scope="session")
def client(hub: FakeHub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """The real client of the Hub, in a process of its own that only knows `hub`."""
    from tests.hub.client import Client

    client = Client(hub.url, tmp_path_factory.mktemp("hf"))
    yield client
    client.close()


@pytest.fixture(autouse=True)
def tuned_for_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs of heads hold on every machine, so that no test depends on its speed; a module may override this."""
    monkeypatch.setattr("headstart.decoder.tuned_here", lambda tuning, *_: tuning)
