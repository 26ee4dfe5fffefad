"""Shared fixtures: a tiny target with a real tokenizer, the same saved as a folder, and a Hub.

Tests do not depend on the caller's home folder, working folder or environment variables. The session has an empty home,
and each test runs in an empty folder of its own. Compiled libraries, whose names are hashes of their sources and
contents, and the unpacked SmolLM2 are shared with the caller's cache.
"""

from __future__ import annotations

import gc
import os
import site
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
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

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for `rehearsal`; last: its links are called train, data ...

FOREIGN = (
    *("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "GROUP_", "ROLE_", "TORCHELASTIC_", "ACCELERATE_", "FSDP_"),
    *("SLURM_", "OMPI_", "MPI_", "MV2_"),
    *("HF_", "HUGGING", "TRANSFORMERS_", "WANDB_", "TENSORBOARD_", "XDG_", "MPL"),
    *("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "PY_COLORS", "TTY_", "GITHUB_ACTIONS"),
)
"""Prefixes of environment variables that launchers, trackers, caches and terminals set."""

_HOME = tempfile.TemporaryDirectory(prefix="headstart-tests-", ignore_cleanup_errors=True)


def _settle(home: Path) -> None:
    """Switch to an empty home before the fixtures import libraries that read it at import."""
    # pytest keeps its copies of 240 test files, and a command in a process of its own compiles none of ours.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    os.environ["PYTHONUSERBASE"] = site.getuserbase()  # packages may be installed in the real home
    # Workers of pytest-xdist inherit it from the process that starts them, which has settled too.
    caller = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    cache = os.environ.setdefault("HEADSTART_TESTS_CACHE", caller)
    compiled = Path("headstart", "compiled")
    known = Path(cache) / compiled
    with suppress(OSError):  # without it, each session compiles for 10 s
        known.mkdir(mode=0o755, parents=True, exist_ok=True)
        if known.stat().st_uid == os.geteuid() and not known.stat().st_mode & 0o022:
            (home / ".cache" / "headstart").mkdir(parents=True)
            (home / ".cache" / compiled).symlink_to(known, target_is_directory=True)
    for name in [name for name in os.environ if name.startswith(FOREIGN)]:
        del os.environ[name]
    os.environ.update(HOME=str(home), XDG_CACHE_HOME=str(home / ".cache"), HF_HOME=str(home / ".cache" / "huggingface"))


_settle(Path(_HOME.name))

if "OMP_NUM_THREADS" in os.environ:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def pytest_collection_finish() -> None:
    """Exclude all imports from garbage collection, which would scan them for 0.3 s each time."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _away(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Run module- and session-scoped fixtures in an empty folder too."""
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("away"))
    yield
    os.chdir(before)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test in its own empty folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _threads_stay() -> Iterator[None]:
    """Restore torch's thread count after each test."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def _guard() -> Iterator[Any]:
    """Raise drafters' errors. The decode loop would catch them and decode plainly, and the test would pass."""
    from headstart.decode import batch

    with pytest.MonkeyPatch.context() as patched:
        caught = batch.DRAFTER_ERRORS
        patched.setattr(batch, "DRAFTER_ERRORS", ())
        yield caught


@pytest.fixture(autouse=True)
def _drafters_may_fail(request: pytest.FixtureRequest, _guard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catch drafters' errors, as in production, in tests marked `drafter_fails`."""
    if request.node.get_closest_marker("drafter_fails"):
        monkeypatch.setattr("headstart.decode.batch.DRAFTER_ERRORS", _guard)


@pytest.fixture(scope="session")
def tiny_target() -> Target:
    """A random float32 Llama of 3 layers with a byte-level tokenizer and a ChatML template."""
    from headstart.model.model import Target
    from tests.tiny import tiny_model, tiny_tokenizer

    tokenizer = tiny_tokenizer()
    model = tiny_model("llama", vocab_size=len(tokenizer), max_length=1024)
    return Target(model, tokenizer, "tiny")


@pytest.fixture(scope="module")
def target() -> Target:
    """A random float32 Llama of 3 layers and 61 tokens, without a tokenizer; a module may override this."""
    from headstart.model.model import Target
    from tests.tiny import tiny_model

    return Target(tiny_model("llama", vocab_size=61))


@pytest.fixture(scope="session")
def tiny_target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model and tokenizer of `tiny_target`, saved so that `load_target(str(folder))` reads them."""
    from tests.tiny import save_tiny_target

    folder = tmp_path_factory.mktemp("tiny") / "target"
    save_tiny_target(folder)
    return folder


@pytest.fixture
def nothing_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile the target's kernels again, without cached libraries; warnings come again as well."""
    from headstart.kernels import cpu_attention, prepacked
    from headstart.support import compiled

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(compiled, "_WARNED", set())
    cpu_attention._compiled.cache_clear()
    prepacked._compiled.cache_clear()
    yield
    cpu_attention._compiled.cache_clear()
    prepacked._compiled.cache_clear()


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str], list[Any]]:
    """Record the positional arguments of every call of a function, which still runs."""
    from tests import spies

    return lambda owner, name: spies.spy(monkeypatch, owner, name, lambda *arguments: arguments)


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """A fork server: runs commands in separate processes without repeating their imports."""
    from tests.forks import Forks

    made = Forks(tmp_path_factory.mktemp("forks"))
    yield made
    made.close()


@pytest.fixture
def device() -> Iterator[StandIn]:
    """A stand-in GPU."""
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
def costs_are_local(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the stored costs of heads, so that no test depends on this machine's speed; a module may override this."""
    monkeypatch.setattr("headstart.decoder.with_local_costs", lambda tuning, *_: tuning)


@pytest.fixture
def flex_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let flex attention run on a CPU, uncompiled. torch refuses gradients there, although its reference has them."""
    from torch.nn.attention import flex_attention

    from headstart.heads.base import DraftHead
    from headstart.support import regions

    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    monkeypatch.setattr(flex_attention, "_WARNINGS_SHOWN", {"flex_attention_performance"})
    monkeypatch.setattr(regions, "compile_region", lambda function: function)
    monkeypatch.setattr(DraftHead, "uses_flex", property(lambda heads: heads.compiled and heads.training))
