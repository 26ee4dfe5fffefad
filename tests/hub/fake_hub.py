"""An in-memory Hub on 127.0.0.1 for the calls of the real huggingface_hub client: create, upload and download."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

WRITE_TOKEN = "hf_write"
READ_TOKEN = "hf_read"
USER = "user"


@dataclass
class Repo:
    """A repository: its commits, and the commit of each branch and tag."""

    private: bool = False
    gated: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    messages: dict[str, str] = field(default_factory=dict)

    def commit(self, files: dict[str, bytes], branch: str = "main", message: str = "") -> str:
        oid = hashlib.sha1(repr((sorted(files), len(self.commits))).encode()).hexdigest()
        self.commits[oid] = files
        self.refs[branch], self.messages[oid] = oid, message
        return oid

    def find(self, revision: str) -> str | None:
        return revision if revision in self.commits else self.refs.get(revision)


class FakeHub:
    """The server. `repos` holds all repositories, `calls` every (method, path)."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.large: dict[str, bytes] = {}
        self.calls: list[tuple[str, str]] = []
        self._port = 0
        self._start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def _start(self) -> None:
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), handler)
        self._port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    @contextmanager
    def down(self) -> Iterator[None]:
        """Stop the server within the block."""
        self.stop()
        try:
            yield
        finally:
            self._start()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub

    def log_message(self, *_: Any) -> None:
        """Stay silent."""

    def do_GET(self) -> None:
        self._serve()

    do_HEAD = do_POST = do_PUT = do_GET

    def _serve(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        self.hub.calls.append((self.command, path))
        parts = path.strip("/").split("/")
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if path.startswith("/upload/"):  # presigned storage URLs need no token
            oid = parts[1]
            if hashlib.sha256(self.body).hexdigest() != oid:
                return self._error(400, "", "the content has another hash")
            self.hub.large[oid] = self.body
            return self._json({})
        if token and token not in (WRITE_TOKEN, READ_TOKEN):
            return self._error(401, "", "Invalid credentials")
        if path == "/api/repos/create":
            return self._create(token)
        if path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        repo_id, rest = self._repo_and_rest(parts)
        repo = self.hub.repos.get(repo_id)
        if repo is None or (repo.private and not token):
            return self._error(404 if token else 401, "RepoNotFound", "Repository not found")
        if repo.gated:
            return self._error(403, "GatedRepo", "Access to this model is restricted")
        if self.command in ("POST", "PUT") and token != WRITE_TOKEN:
            return self._error(403, "", "Forbidden: write access is needed")
        match rest:
            case ["preupload", _]:
                modes = {True: "lfs", False: "regular"}
                paths = [file["path"] for file in json.loads(self.body)["files"]]
                files = [(path, modes[path.endswith(".safetensors")]) for path in paths]
                self._json({"files": [{"path": p, "uploadMode": mode, "shouldIgnore": False} for p, mode in files]})
            case ["info", "lfs", "objects", "batch"]:
                objects = [
                    {**entry, "actions": {"upload": {"href": f"{self.hub.url}/upload/{entry['oid']}"}}}
                    for entry in json.loads(self.body)["objects"]
                ]
                self._json({"transfer": "basic", "objects": objects})
            case ["commit", branch]:
                self._commit(repo_id, repo, branch)
            case ["branch", branch]:
                if branch in repo.refs:
                    return self._error(409, "", f"Reference already exists: {branch}")
                repo.refs[branch] = repo.refs["main"]
                self._json({})
            case ["revision", revision]:
                self._info(repo_id, repo, revision)
            case []:
                self._info(repo_id, repo, "main")
            case ["tree", revision, *_]:
                self._tree(repo, revision)
            case ["resolve", revision, *file]:
                self._file(repo, revision, "/".join(file))
            case _:
                self._error(404, "", f"the fake Hub does not know {path}")

    def _repo_and_rest(self, parts: list[str]) -> tuple[str, list[str]]:
        """Split a path into the repository and the rest."""
        if parts[:2] in (["api", "models"], ["api", "datasets"]):
            parts = parts[2:]
        if parts[0] == "datasets":
            parts = parts[1:]
        return "/".join(parts[:2]).removesuffix(".git"), parts[2:]

    def _create(self, token: str) -> None:
        if not token:
            return self._error(401, "", "Invalid username or password.")
        wanted = json.loads(self.body)
        owner = wanted.get("organization") or USER
        repo_id = f"{owner}/{wanted['name']}"
        if token != WRITE_TOKEN or owner != USER:
            return self._error(403, "", "You don't have the rights to create a model under this namespace")
        if repo_id in self.hub.repos:
            return self._json({"error": "You already created this model repo", "url": f"{self.hub.url}/{repo_id}"}, 409)
        private = bool(wanted.get("private")) or wanted.get("visibility") == "private"
        self.hub.repos[repo_id] = Repo(private)
        self.hub.repos[repo_id].commit({})
        self._json({"url": f"{self.hub.url}/{repo_id}", "name": repo_id, "id": repo_id})

    def _commit(self, repo_id: str, repo: Repo, branch: str) -> None:
        files, message = dict(repo.commits[repo.refs[branch]]), ""
        for line in self.body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.hub.large[value["oid"]]
            elif entry["key"] == "deletedFile":
                del files[value["path"]]
            elif entry["key"] == "header":
                message = value["summary"]
        oid = repo.commit(files, branch, message)
        self._json({"success": True, "commitOid": oid, "commitUrl": f"{self.hub.url}/{repo_id}/commit/{oid}"})

    def _info(self, repo_id: str, repo: Repo, revision: str) -> None:
        if (oid := repo.find(revision)) is None:
            return self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        siblings = [{"rfilename": name} for name in repo.commits[oid]]
        self._json({"id": repo_id, "modelId": repo_id, "sha": oid, "private": repo.private, "siblings": siblings})

    def _tree(self, repo: Repo, revision: str) -> None:
        if (oid := repo.find(revision)) is None:
            return self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        files = [(name, len(data), hashlib.sha1(data).hexdigest()) for name, data in repo.commits[oid].items()]
        self._json([{"type": "file", "path": name, "size": size, "oid": oid} for name, size, oid in files])

    def _file(self, repo: Repo, revision: str, name: str) -> None:
        if (oid := repo.find(revision)) is None:
            return self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        content = repo.commits[oid].get(name)
        if content is None:
            return self._error(404, "EntryNotFound", f"Entry not found: {name}")
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": oid}
        self._reply(200, content, headers)

    def _json(self, value: Any, status: int = 200) -> None:
        self._reply(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _error(self, status: int, code: str, message: str) -> None:
        body = json.dumps({"error": message}).encode()
        headers = {"Content-Type": "application/json", "X-Error-Message": message}
        self._reply(status, body, {**headers, "X-Error-Code": code} if code else headers)

    def _reply(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
