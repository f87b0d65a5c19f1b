"""Real coding agents against the server: each writes a file with its own tools, reads it back, and is done.

They are npm packages of some hundred megabytes, so these tests run by hand:

    npm install --prefix FOLDER @earendil-works/pi-coding-agent opencode-ai @openai/codex @anthropic-ai/claude-code
    MLX_SPEC_AGENTS=FOLDER python -m pytest -m slow tests/server/test_agents.py

The model is tiny and random, with the demo's tokenizer: their own prompts have up to 20,000 tokens. A grammar
forces its replies, as the number of results in the prompt tells.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes
from served import Served, serve
from tiny_folders import folder_config

from mlx_spec.checkpoints.hub import resolve
from mlx_spec.decoding.grammar import Grammar
from mlx_spec.server import chat
from mlx_spec.server.chat import ChatRequest

FOLDER = os.environ.get("MLX_SPEC_AGENTS", "")
TEXT = "written by an agent"
WAIT = 300
pytestmark = pytest.mark.slow


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def pi(home: Path, url: str, work: Path) -> tuple[list[str], dict[str, str], list[str]]:
    """Return the command, its environment, and the calls to write and to read a file."""
    provider = {"baseUrl": f"{url}/v1", "api": "openai-completions", "apiKey": "any", "models": [{"id": "tiny"}]}
    write_json(home / ".pi/agent/models.json", {"providers": {"mine": provider}})
    calls = [call("write", path="note.txt", content=TEXT), call("read", path="note.txt")]
    return ["pi", "-p", "--provider", "mine", "--model", "tiny", "Write a note."], {}, calls


def opencode(home: Path, url: str, work: Path) -> tuple[list[str], dict[str, str], list[str]]:
    models = {"tiny": {"limit": {"context": 65536, "output": 1024}}}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": f"{url}/v1"}, "models": models}
    write_json(home / ".config/opencode/opencode.json", {"provider": {"mine": provider}, "permission": "allow"})
    file = str(work / "note.txt")
    calls = [call("write", filePath=file, content=TEXT), call("read", filePath=file)]
    return ["opencode", "run", "-m", "mine/tiny", "Write a note."], {}, calls


def claude(home: Path, url: str, work: Path) -> tuple[list[str], dict[str, str], list[str]]:
    environment = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "any",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    file = str(work / "note.txt")
    calls = [call("Write", file_path=file, content=TEXT), call("Read", file_path=file)]
    words = ["claude", "-p", "Write a note.", "--model", "tiny", "--permission-mode", "acceptEdits"]
    return words, environment, calls


def codex(home: Path, url: str, work: Path) -> tuple[list[str], dict[str, str], list[str]]:
    config = f"""model = "tiny"
model_provider = "mine"
[model_providers.mine]
name = "mine"
base_url = "{url}/v1"
wire_api = "responses"
"""
    (home / ".codex").mkdir()
    (home / ".codex/config.toml").write_text(config)
    calls = [call("exec_command", cmd=f"echo {TEXT} > note.txt"), call("exec_command", cmd="cat note.txt")]
    words = [
        "codex",
        "exec",
        "--skip-git-repo-check",
        "--dangerously-bypass-approvals-and-sandbox",
        "Write a note.",
    ]
    return words, {}, calls


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(value))


AGENTS: list[Callable[[Path, str, Path], tuple[list[str], dict[str, str], list[str]]]] = [
    pi,
    opencode,
    claude,
    codex,
]


def write_long(folder: Path) -> Path:
    """Write a small random model of a long context, with the demo's tokenizer, and return its folder."""
    demo = resolve("demo")
    vocab_size = json.loads((demo / "config.json").read_text())["vocab_size"]
    config = folder_config("llama", vocab_size=vocab_size, max_position_embeddings=131072, num_hidden_layers=2)
    ends = {
        name: json.loads((demo / "config.json").read_text())[name] for name in ("bos_token_id", "eos_token_id")
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, **ends}))
    model_class, args_class = _get_classes(config)
    weights = dict(tree_flatten(model_class(args_class.from_dict(config)).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    for file in demo.iterdir():
        if file.name.startswith(("tokenizer", "special_tokens", "chat_template", "generation_config")):
            shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="module")
def long_context(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("agents")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLX_SPEC_CACHE", str(folder / "cache"))
        with serve(write_long(folder / "long"), None, max_tokens=400) as served:
            yield served


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.__name__)
def test_an_agent_writes_a_file_and_reads_it_back(
    agent: Any, long_context: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = Path(FOLDER) / "node_modules/.bin" / agent.__name__
    if not FOLDER or not program.exists():
        pytest.skip(f"needs {agent.__name__} in the folder that MLX_SPEC_AGENTS names")
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir(), work.mkdir()
    (_, *words), environment, calls = agent(home, long_context.url, work)
    asked: list[ChatRequest] = []

    def forced(tokenizer: Any, request: ChatRequest, form: Any, in_reasoning: bool, vocab_size: int) -> Any:
        """Call the tools in turn, then say that all is done; without tools it is a side request."""
        results = sum(message["role"] == "tool" for message in request.messages)  # type: ignore[index]
        if request.tools:
            asked.append(request)
        reply = [*calls, "All is done."][min(results, 2)] if request.tools else "A note"
        return Grammar.lark(f"start: {json.dumps(reply)}").start(tokenizer, vocab_size)

    monkeypatch.setattr(chat, "grammar_of", forced)
    found = subprocess.run(
        [str(program), *words],
        cwd=work,
        env={"PATH": os.environ["PATH"], "HOME": str(home), "TERM": "dumb", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=WAIT,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert (work / "note.txt").read_text().strip() == TEXT
    assert "All is done." in found.stdout
    results = [m["content"] for m in asked[-1].messages if m["role"] == "tool"]  # type: ignore[index]
    assert len(results) == 2 and TEXT in results[-1]
