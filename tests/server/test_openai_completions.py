"""The older completions, driven by OpenAI's own client."""

from typing import Any

import openai
import pytest
from served import Served

from mlx_spec import generate

FIELDS: dict[str, Any] = {"model": "tiny", "prompt": "The target ", "max_tokens": 12}


def test_prompts_are_used_as_they_are(client: openai.OpenAI, served: Served) -> None:
    prompts = ["The target ", "A page "]
    reply = client.completions.create(**{**FIELDS, "prompt": prompts, "n": 2})
    served.wait_until_idle()
    alone = [generate(served.engine, served.tokenizer, prompt, max_tokens=12) for prompt in prompts]
    assert [choice.text for choice in reply.choices] == [alone[0], alone[0], alone[1], alone[1]]
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    ids = [served.tokenizer.encode(prompt) for prompt in prompts]
    assert client.completions.create(**{**FIELDS, "prompt": ids}).choices[1].text == alone[1]
    assert (
        client.completions.create(**{**FIELDS, "prompt": ids[0], "echo": True}).choices[0].text.endswith(alone[0])
    )


@pytest.mark.parametrize(
    "options",
    [{}, {"logprobs": 2}, {"stop": "e"}, {"temperature": 1, "seed": 3, "n": 2}, {"echo": True}],
    ids=lambda options: ",".join(options),
)
def test_the_same_with_and_without_drafts_and_as_a_stream(client: openai.OpenAI, options: dict[str, Any]) -> None:
    options = {**FIELDS, **options}
    plain = client.completions.create(**options, extra_body={"draft": False})
    drafted = client.completions.create(**options, extra_body={"num_draft_tokens": 3})
    assert drafted.choices == plain.choices and drafted.usage == plain.usage
    texts, tokens, reasons = [""] * len(plain.choices), list[str](), [""] * len(plain.choices)
    usage = {"include_usage": True}
    for chunk in client.completions.create(**options, stream=True, stream_options=usage):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            tokens += (choice.logprobs.tokens or []) if choice.logprobs else []
            reasons[choice.index] = choice.finish_reason or ""
    assert texts == [choice.text for choice in plain.choices]
    assert reasons == [choice.finish_reason for choice in plain.choices]
    assert chunk.usage == plain.usage
    assert not plain.choices[0].logprobs or tokens == plain.choices[0].logprobs.tokens


def test_offsets_of_tokens(client: openai.OpenAI) -> None:
    (choice,) = client.completions.create(**FIELDS, logprobs=1).choices
    assert choice.logprobs is not None and choice.logprobs.tokens is not None
    assert "".join(choice.logprobs.tokens) == choice.text
    for offset, token in zip(choice.logprobs.text_offset or [], choice.logprobs.tokens, strict=True):
        assert choice.text[offset:].startswith(token)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"best_of": 3}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [""]}, None),
        ({"prompt": [[9999]]}, None),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"logprobs": 99}, "logprobs"),
    ],
    ids=str,
)
def test_what_cannot_be_served_is_named(client: openai.OpenAI, options: dict[str, Any], param: str | None) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**{**FIELDS, **options})
    assert param is None or caught.value.param == param
