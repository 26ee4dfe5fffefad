"""Ctrl-C while a command is still importing: it exits at once with a message."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headstart.model.model import Target
from tests.hub.helpers import export

INTERRUPTED = """
import os, signal, sys, threading, time

def interrupt(module):
    while module not in sys.modules:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # the parent may ignore SIGINT, which is inherited
threading.Thread(target=interrupt, args=[sys.argv.pop(1)], daemon=True).start()
from headstart.cli.app import main
main()
"""


@pytest.mark.parametrize("module", ["torch", "tokenizers", "transformers.models.llama.modeling_llama"])
def test_interrupted_loading_exits(module: str, tmp_path: Path, tiny_target: Target, tiny_target_folder: Path) -> None:
    """Send the signal as soon as this module begins to be imported."""
    export(tmp_path / "heads", Target(tiny_target.model, tiny_target.tokenizer, str(tiny_target_folder)))
    words = ["generate", str(tmp_path / "heads"), "--prompt", "hi", "--max-new-tokens", "900"]
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, module, *words], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (130, ""), done.stderr
    assert "Stopped." in done.stderr
