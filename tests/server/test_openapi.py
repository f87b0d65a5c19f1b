"""Bodies made from the server's own description: none is answered with an error of the server, none hangs.

The package is large, so this runs by hand: ``pip install schemathesis``, then this file with ``-m slow``.
"""

import json
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from served import Served, serve, write_pair

PROGRAM = shutil.which("schemathesis", path=str(Path(sys.executable).parent))


def described(url: str) -> Any:
    with urllib.request.urlopen(f"{url}/openapi.json", timeout=60) as answer:
        return json.load(answer)


def test_the_description(served: Served) -> None:
    """Every route is there, with what it takes and the errors that it may answer."""
    paths = described(served.url)["paths"]
    assert sorted(paths) == [
        "/health",
        "/metrics",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/models",
        "/v1/models/{model}",
        "/v1/responses",
    ]
    for path, routes in paths.items():
        for operation in routes.values():
            assert {"200", "400", "429", "503"} <= operation["responses"].keys(), path
            assert "422" not in operation["responses"]
    for schema in described(served.url)["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


@pytest.fixture
def short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setenv("MLX_SPEC_CACHE", str(tmp_path / "cache"))
    with serve(write_pair(tmp_path / "tiny"), max_tokens=16) as served:
        yield served


@pytest.mark.slow
def test_no_body_hurts_the_server(short: Served, tmp_path: Path) -> None:
    """All checks but that every body which fits the schema is served: whether a token exists is in no schema."""
    if PROGRAM is None:
        pytest.skip("needs `pip install schemathesis`")
    words = [PROGRAM, "run", f"{short.url}/openapi.json", "--checks", "all", "--max-examples", "40"]
    left_out = "positive_data_acceptance"
    found = subprocess.run(
        [*words, "--exclude-checks", left_out, "--request-timeout", "60", "--generation-deterministic"],
        cwd=tmp_path,  # it keeps what it found
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert found.returncode == 0, found.stdout[-6000:]
    short.wait_until_idle()
    assert not short.worker.is_wedged
