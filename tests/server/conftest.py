"""One server for all tests that need no other."""

from collections.abc import Iterator

import anthropic
import openai
import pytest
from served import Served, serve, write_pair


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLX_SPEC_CACHE", str(folder / "cache"))
        with serve(write_pair(folder / "tiny"), keepalive_seconds=0.2) as server:
            yield server


@pytest.fixture(scope="session")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60) as found:
        yield found


@pytest.fixture(scope="session")
def claude(served: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0, timeout=60) as found:
        yield found
