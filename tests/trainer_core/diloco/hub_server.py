"""A server that speaks the part of the Hugging Face Hub's protocol that the store rests on.

One repository, `owner/name`, one branch, `main`; files go in the commits themselves ("regular").
Written from huggingface_hub's requests, so it shows that ours are whole and in order, and how they
behave under concurrent commits. It can't show that the real Hub does as this does.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.trainer_core.diloco.servers import Server

API = "/api/models/owner/name/"


class Repository:
    def __init__(self) -> None:
        self.commits: list[tuple[str, dict[str, bytes]]] = [("0" * 40, {})]
        self.lock = threading.Lock()

    def at(self, revision: str) -> dict[str, bytes]:
        wanted = self.commits[-1][0] if revision == "main" else revision
        return next(files for sha, files in self.commits if sha == wanted)

    def commit(self, lines: list[dict[str, Any]]) -> tuple[int, dict[str, Any]]:
        with self.lock:
            head, files = self.commits[-1]
            files = dict(files)
            for line in lines:
                value = line["value"]
                if line["key"] == "header" and value.get("parentCommit") not in (None, head):
                    return 412, {
                        "error": "A commit has happened since. Please refresh and try again."
                    }
                if line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                if line["key"] == "deletedFile":
                    files.pop(value["path"], None)
            sha = hashlib.sha1(f"{head}{len(self.commits)}".encode()).hexdigest()
            self.commits.append((sha, files))
            return 200, {
                "success": True,
                "commitOid": sha,
                "commitUrl": f"https://huggingface.co/owner/name/commit/{sha}",
            }


def described(path: str, content: bytes) -> dict[str, Any]:
    return {
        "type": "file",
        "path": path,
        "size": len(content),
        "oid": hashlib.sha1(content).hexdigest(),
    }


def listed(files: dict[str, bytes], folder: str, recursive: bool) -> list[dict[str, Any]] | None:
    start, found = f"{folder}/" if folder else "", {}
    for path, content in files.items():
        if path.startswith(start):
            first, slash, _ = path[len(start) :].partition("/")
            if recursive:
                found[path] = described(path, content)
                continue
            kind = {"type": "directory", "path": start + first, "oid": "0" * 40, "size": 0}
            found[first] = kind if slash else described(path, content)
    return list(found.values()) if found or not folder else None


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    repository: Repository

    def log_message(self, *arguments: object) -> None:
        return

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if path.startswith("/owner/name/resolve/"):
            revision, _, name = path.removeprefix("/owner/name/resolve/").partition("/")
            return self._file(self.repository.at(revision).get(name))
        verb, _, rest = path.removeprefix(API).partition("/")
        revision, _, folder = rest.partition("/")
        if not path.startswith(API):
            return self._say(404, {"error": "no such repository"}, {"X-Error-Code": "RepoNotFound"})
        if verb == "tree":
            tree = listed(
                self.repository.at(revision), folder, "recursive=true" in self.path.lower()
            )
            return self._say(200, tree) if tree is not None else self._missing()
        sha = self.repository.commits[-1][0]
        return self._say(200, {"id": "owner/name", "sha": sha, "siblings": []})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        verb, _, revision = urlsplit(self.path).path.removeprefix(API).partition("/")
        if verb == "paths-info":
            files = self.repository.at(revision)
            asked = parse_qs(body.decode())["paths"]
            return self._say(200, [described(name, files[name]) for name in asked if name in files])
        if verb == "preupload":
            asked = [
                {"path": one["path"], "uploadMode": "regular"} for one in json.loads(body)["files"]
            ]
            return self._say(200, {"files": [{**one, "shouldIgnore": False} for one in asked]})
        return self._say(*self.repository.commit([json.loads(line) for line in body.splitlines()]))

    def _missing(self) -> None:
        self._say(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})

    def _file(self, content: bytes | None) -> None:
        if content is None:
            return self._missing()
        if asked := self.headers.get("Range"):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            if int(first) >= len(content):
                return self._say(416, {"error": "range"})
            content = content[int(first) : int(last) + 1 if last else None]
        return self._send(206 if asked else 200, content, {})

    def _say(self, status: int, answer: Any, headers: dict[str, str] | None = None) -> None:
        self._send(status, json.dumps(answer).encode(), headers or {})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


@contextlib.contextmanager
def hub_server() -> Iterator[Server]:
    handler = type("OneRepository", (Handler,), {"repository": Repository()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        address = f"http://127.0.0.1:{server.server_port}"
        yield Server("hf://owner/name", {"endpoint": address, "token": "hf_" + "x" * 20})
    finally:
        server.shutdown()
        server.server_close()
