"""Downloads, against a server of our own: only the published file is kept."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from fleetpilot.workloads.fetch import SOURCES, Source, fetch

GOOD = b"arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,374,44\n4.314579,396,109\n"
OTHER = GOOD.replace(b"374", b"375")
FILE = "splitwise_tiny.csv"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        content = {"/good": GOOD, "/other": OTHER, "/page": b"<html>moved</html>"}.get(self.path, GOOD)
        if self.path == "/missing":
            self.send_error(404)
            return
        self.send_response(200)
        if self.path == "/unmeasured":
            content = GOOD[:-5]
        else:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[:-5] if self.path == "/short" else content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def tiny_source(monkeypatch: pytest.MonkeyPatch) -> None:
    digest = hashlib.sha256(GOOD).hexdigest()
    url = f"https://example.org/{FILE}"
    monkeypatch.setitem(SOURCES, "tiny", Source(url, "vidur", "MIT", "nobody", len(GOOD), digest))
    monkeypatch.setitem(SOURCES, "unsigned", Source(url, "vidur", "MIT", "nobody"))


def test_the_published_file_is_kept(server: str, tmp_path: Path) -> None:
    path = fetch("tiny", tmp_path / "new" / "folder", url=f"{server}/good")
    assert path == tmp_path / "new" / "folder" / FILE
    assert path.read_bytes() == GOOD
    assert list(path.parent.iterdir()) == [path]


def test_what_is_there_is_not_downloaded_again(server: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(GOOD)
    assert fetch("tiny", tmp_path, url=f"{server}/missing").read_bytes() == GOOD
    (tmp_path / FILE).write_bytes(OTHER)
    with pytest.raises(ValueError, match=f"{FILE}: sha256 .*: expected"):
        fetch("tiny", tmp_path, url=f"{server}/good")


@pytest.mark.parametrize(
    ("name", "page", "error", "message"),
    [
        ("tiny", "other", ValueError, "sha256 .*: expected"),
        ("tiny", "short", ValueError, f"{len(GOOD) - 5} bytes arrived: expected the {len(GOOD)} that were promised"),
        ("tiny", "unmeasured", ValueError, f"{len(GOOD) - 5} bytes: expected the {len(GOOD)} of https://example.org"),
        ("tiny", "missing", OSError, "404"),
        ("unsigned", "short", ValueError, "were promised"),
        ("unsigned", "page", ValueError, "no known trace format"),
    ],
)
def test_nothing_else_leaves_a_file(
    server: str, tmp_path: Path, name: str, page: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        fetch(name, tmp_path, url=f"{server}/{page}")
    assert list(tmp_path.iterdir()) == []


def test_no_server_no_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"refused|urlopen"):
        fetch("tiny", tmp_path, url="http://127.0.0.1:9/good")
    assert list(tmp_path.iterdir()) == []


def test_without_a_published_digest_ours_is_printed(
    server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fetch("unsigned", tmp_path, url=f"{server}/good")
    assert f"sha256 {hashlib.sha256(GOOD).hexdigest()}" in capsys.readouterr().out


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="trace 'azure': expected one of azure_2023_code, azure_2023_conv"):
        fetch("azure", tmp_path)


def test_the_table_of_sources_is_well_formed() -> None:
    for name, source in SOURCES.items():
        assert source.url.startswith("https://"), name
        assert source.licence
        assert source.attribution
        assert source.sha256 is None or (len(source.sha256) == 64 and set(source.sha256) <= set("0123456789abcdef"))
