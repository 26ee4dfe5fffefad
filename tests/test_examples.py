"""The examples, with toy heads and small servers."""

from __future__ import annotations

import json
import re
import runpy
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from headstart.data.prompts.shapes import parse_prompt
from headstart.model.model import Target
from headstart.recipes.recipe import load_recipe
from rehearsal.engine_http import StandIn
from tests.hub.helpers import export

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
NOTEBOOK = json.loads((EXAMPLES / "decode.ipynb").read_text(encoding="utf-8"))
CELLS = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_runs_from_top_to_bottom(
    tiny_target: Target, tiny_target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export(tmp_path / "heads", Target(tiny_target.model, tiny_target.tokenizer, str(tiny_target_folder)))
    names: dict[str, object] = {}
    for cell in CELLS:
        source = "".join(cell["source"]).replace("../runs/quickstart", str(tmp_path / "heads"))
        exec(compile(source, "decode.ipynb", "exec"), names)
        assert capsys.readouterr().out, "each cell shows something"


def test_the_notebook_shows_a_run_of_all_its_cells() -> None:
    assert [cell["execution_count"] for cell in CELLS] == list(range(1, len(CELLS) + 1))
    assert all(output["output_type"] == "stream" for cell in CELLS for output in cell["outputs"]), "no error"
    assert all(cell["outputs"] for cell in CELLS)
    assert not re.search(r"/(?:home|root|tmp|work|Users)/", json.dumps(NOTEBOOK))


def test_the_recipe_of_a_model_of_ones_own_is_valid() -> None:
    recipe = load_recipe(str(EXAMPLES / "own_model" / "recipe.yaml"))
    lines = (EXAMPLES / "own_model" / recipe.data.prompts).read_text(encoding="utf-8").splitlines()
    assert len([parse_prompt(json.loads(line), "") for line in lines]) >= recipe.data.heldout + recipe.data.validation


def test_the_serving_example_logs_requests_with_their_users(
    tiny_target: Target,
    tiny_target_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    export(tmp_path / "heads", Target(tiny_target.model, tiny_target.tokenizer, str(tiny_target_folder)))
    requests = [("anna", "the sun"), ("private", "the moon"), ("ben", "rice")]
    rows = [json.dumps({"user": user, "prompt": text}) + "\n" for user, text in requests]
    (tmp_path / "requests.jsonl").write_text("".join(rows))
    arguments = ["serve.py", "requests.jsonl", "--heads", "heads", "--log", "traffic", "--max-new-tokens", "6"]
    monkeypatch.setattr(sys, "argv", arguments)
    runpy.run_path(str(EXAMPLES / "adapting" / "serve.py"), run_name="__main__")
    assert capsys.readouterr().out.count("tokens per round with heads") == 3
    (log,) = (tmp_path / "traffic").glob("served-*.jsonl")
    assert [json.loads(line)["source"] for line in log.read_text().splitlines()] == ["anna", "ben"]


def test_the_client_reports_acceptance(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Two rounds of two drafts, with one accepted; earlier rounds do not count."""
    stand_in = StandIn("vllm", lambda prompt, most, body: ([], {}), drafts=2, rounds=7, accepted=[5, 1])

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._say(stand_in.page(self.path) or "")

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            stand_in.rounds += 2
            stand_in.accepted[0] += 1
            said = f"{asked['model']} heard: {asked['messages'][0]['content']}"
            self._say(json.dumps({"choices": [{"message": {"content": said}}]}))

        def _say(self, page: str) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(page.encode())

        def log_message(self, form: str, *words: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(sys, "argv", ["client.py", "Why?", "--server", address])
    try:
        runpy.run_path(str(EXAMPLES / "vllm" / "client.py"), run_name="__main__")
    finally:
        server.shutdown()
        server.server_close()
    assert capsys.readouterr().out == (
        "target heard: Why?\n\n2 rounds, 0.50 accepted drafts per round (0.50, 0.00 by position)\n"
    )
