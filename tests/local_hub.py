"""A Hugging Face hub on this machine for tests: the real client asks it for the files of local folders."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

SHA = "0123456789abcdef0123456789abcdef01234567"


def cache_layout(folder: Path, name: str, hub_cache: Path) -> Path:
    """The folder as a model in a hub cache, as `snapshot_download` leaves one: blobs, a snapshot of links, a ref."""
    repo = hub_cache / f"models--{name.replace('/', '--')}"
    snapshot = repo / "snapshots" / SHA
    for made in (snapshot, repo / "refs", repo / "blobs"):
        made.mkdir(parents=True)
    (repo / "refs" / "main").write_text(SHA)
    for file in folder.iterdir():
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        (repo / "blobs" / digest).write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/{digest}")
    return snapshot


@contextmanager
def hub(repos: dict[str, Path | str]) -> Iterator[str]:
    """The endpoint of a hub with these models or data sets: a folder, or the error code that the hub answers with."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(body=True)

        def do_POST(self) -> None:
            self._answer(body=True)

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def _answer(self, body: bool) -> None:
            path = self.path.partition("?")[0]
            name = next((known for known in repos if f"/{known}/" in f"{path}/"), None)
            found = repos.get(name or "", "RepoNotFound")
            if isinstance(found, str):
                return self._send(b"{}", body, 403 if found == "GatedRepo" else 404, {"X-Error-Code": found})
            if path.startswith("/api/"):
                return self._send(json.dumps(self._described(path, str(name), found)).encode(), body)
            file = found / path.partition("/resolve/")[2].partition("/")[2]
            if not file.is_file():
                return self._send(b"{}", body, 404, {"X-Error-Code": "EntryNotFound"})
            etag = hashlib.sha256(file.read_bytes()).hexdigest()
            return self._send(file.read_bytes(), body, 200, {"ETag": f'"{etag}"', "X-Repo-Commit": SHA})

        def _described(self, path: str, name: str, folder: Path) -> Any:
            if "/tree/" not in path:
                return {"id": name, "sha": SHA, "siblings": [], "tags": [], "downloads": 0, "likes": 0}
            inside = folder / path.partition("/tree/")[2].partition("/")[2]
            found = inside.iterdir() if "recursive=false" in self.path else inside.rglob("*")
            return [
                {"type": "file", "path": str(each.relative_to(folder)), "size": each.stat().st_size, "oid": "0" * 40}
                if each.is_file()
                else {"type": "directory", "path": str(each.relative_to(folder)), "oid": "0" * 40}
                for each in sorted(found)
            ]

        def _send(self, content: bytes, body: bool, status: int = 200, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for key, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
                self.send_header(key, value)
            self.end_headers()
            if body:
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
