"""Pulling from a hub: a small hub on the loopback for the real client, and every way it can refuse."""

import errno
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from minivllm_plugin.errors import ModelDownloadError
from minivllm_plugin.models import hub_download
from minivllm_plugin.models.catalog import resolve
from minivllm_plugin.models.pull import ensure_local, local_path, local_size, pull

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
    "generation_config.json": b"{}",
    "model.safetensors.index.json": json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}).encode(),
    "model-1.safetensors": b"weights one",
    "model-2.safetensors": b"weights two",
    "pytorch_model.bin": b"never fetched",
    "original/model.safetensors": b"never fetched",
}
FETCHED = sorted(name for name in FILES if "never" not in FILES[name].decode())


def snapshot(cache: Path, repo: str, files: dict[str, bytes]) -> Path:
    """A snapshot as the hub client lays it out, without a listing of what belongs to it."""
    base = cache / f"models--{repo.replace('/', '--')}"
    directory = base / "snapshots" / COMMIT
    directory.mkdir(parents=True)
    (base / "refs").mkdir()
    (base / "refs" / "main").write_text(COMMIT)
    for name, content in files.items():
        if "/" not in name:
            (directory / name).write_bytes(content)
    return directory


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return cache


def test_a_complete_snapshot_is_used_offline(hub_cache: Path) -> None:
    directory = snapshot(hub_cache, "org/name", FILES)
    source = resolve("org/name")
    assert local_path(source) == directory
    assert ensure_local(source) == directory
    assert local_size(source) == sum(len(content) for name, content in FILES.items() if "/" not in name)


@pytest.mark.parametrize("lacking", ["config.json", "model-2.safetensors", "tokenizer.json"])
def test_an_incomplete_snapshot_is_not_used(hub_cache: Path, lacking: str) -> None:
    snapshot(hub_cache, "org/name", {name: content for name, content in FILES.items() if name != lacking})
    assert local_path(resolve("org/name")) is None
    with pytest.raises(
        ModelDownloadError, match=r"'org/name'.*HF_HUB_OFFLINE.*config\.json.*HF_TOKEN.*by its path.*smollm2-135m"
    ):
        ensure_local(resolve("org/name"))


@pytest.mark.parametrize("index", [b"{not json", b"[]", b'{"weight_map": 3}'])
def test_a_broken_index_counts_as_missing(tmp_path: Path, index: bytes) -> None:
    for name, content in {**FILES, hub_download.INDEX: index}.items():
        if "/" not in name:
            (tmp_path / name).write_bytes(content)
    assert hub_download.missing_files(tmp_path) == [f"{hub_download.INDEX} (readable)"]


def test_a_directory_without_weights_says_which_file(tmp_path: Path) -> None:
    assert hub_download.missing_files(tmp_path) == ["config.json", "model.safetensors", "tokenizer.json"]


def refusal(kind: type[BaseException]) -> BaseException:
    """The client's error without the HTTP response that its constructor asks for."""
    error = kind.__new__(kind, "refused")
    error.args = ("refused",)
    return error


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (refusal(errors.GatedRepoError), "is gated: accept its licence"),
        (refusal(errors.RepositoryNotFoundError), "does not exist, or is private"),
        (refusal(errors.RevisionNotFoundError), "has no revision 'v9'"),
        (ConnectionError("no route"), r"could not be reached \(ConnectionError: no route\)"),
        (OSError(errno.ENOSPC, "No space left on device"), "is full"),
    ],
)
def test_every_refusal_names_the_repository_and_a_remedy(
    hub_cache: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, says: str
) -> None:
    def refuse(*_: object, **options: object) -> str:
        raise FileNotFoundError if options["local_files_only"] else error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(ModelDownloadError, match=says) as caught:
        ensure_local(resolve("org/name", revision="v9"))
    assert "'org/name' at 'v9'" in str(caught.value)
    assert any(remedy in str(caught.value) for remedy in ("HF_TOKEN", "HF_HOME"))
    assert caught.value.__cause__ is error


def test_an_unreachable_hub_still_serves_a_complete_snapshot(hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = snapshot(hub_cache, "org/name", FILES)

    def refuse(*_: object, **options: object) -> str:
        if options["local_files_only"]:
            return str(directory)
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    assert pull("org/name") == directory


@pytest.fixture
def hub_server() -> Iterator[str]:
    """A hub with one repository, ``org/name``, and one without weights, ``org/empty``; returns its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            """Silence."""

        def files(self) -> dict[str, bytes]:
            return {"config.json": b"{}"} if "org/empty" in self.path else FILES

        def send(self, status: int, content: bytes, **headers: str) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), "X-Repo-Commit": COMMIT, **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def do_GET(self) -> None:  # http.server's name
            path = self.path.split("?")[0]
            as_json = {"Content_Type": "application/json"}
            if "org/" not in path or "unknown" in path:
                self.send(404, b"{}", X_Error_Code="RepoNotFound", **as_json)
            elif "/tree/" in path:
                listing = [
                    {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                    for name, content in self.files().items()
                ]
                self.send(200, json.dumps(listing).encode(), **as_json)
            elif path.startswith("/api/models/"):
                siblings = [{"rfilename": name} for name in self.files()]
                self.send(200, json.dumps({"id": "org/name", "sha": COMMIT, "siblings": siblings}).encode(), **as_json)
            else:
                content = self.files()[path.split(f"/resolve/{COMMIT}/")[1]]
                self.send(200, content, ETag=f'"{hashlib.sha1(content).hexdigest()}"')

        do_HEAD = do_GET  # noqa: N815

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, name="small-hub")
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def run_pull(name: str, endpoint: str, home: Path) -> "subprocess.CompletedProcess[str]":
    """``minivllm pull`` in a process of its own: the hub client reads its settings once, at import."""
    code = f"from minivllm_plugin.cli import main; main(['pull', {name!r}])"
    proxies = {name: "" for name in os.environ if name.lower().endswith("_proxy")}
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", **proxies}
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **settings}, capture_output=True, text=True, timeout=120
    )


def test_a_real_client_fetches_what_we_read_and_nothing_else(hub_server: str, tmp_path: Path) -> None:
    done = run_pull("org/name", hub_server, tmp_path)
    assert done.returncode == 0, done.stderr
    directory = Path(done.stdout.strip())
    assert sorted(path.name for path in directory.iterdir()) == FETCHED
    assert "\x1b" not in done.stderr
    assert "%" not in done.stderr
    again = run_pull("org/name", "http://127.0.0.1:9", tmp_path)  # nobody listens there
    assert (again.returncode, again.stdout) == (0, done.stdout)


@pytest.mark.parametrize(("name", "says"), [("org/unknown", "does not exist"), ("org/empty", "has no model.safetensors")])
def test_a_real_client_refused_is_one_clean_message(hub_server: str, tmp_path: Path, name: str, says: str) -> None:
    done = run_pull(name, hub_server, tmp_path)
    assert done.returncode == 1
    assert says in done.stderr
    assert name in done.stderr
    assert "Traceback" not in done.stderr


def test_no_network_is_one_clean_message(tmp_path: Path) -> None:
    done = run_pull("qwen3-0.6b", "http://127.0.0.1:9", tmp_path)
    assert done.returncode == 1
    assert "'Qwen/Qwen3-0.6B' could not be reached" in done.stderr
    assert "Traceback" not in done.stderr
