"""Generating text: prompts in, text segments out. What ``mlx_lm.generate`` offers, with a drafter."""

from mlx_spec.generate.conversation import Conversation as Conversation
from mlx_spec.generate.options import chat_prompt as chat_prompt
from mlx_spec.generate.options import text_request as text_request
from mlx_spec.generate.stream import GenerationResponse as GenerationResponse
from mlx_spec.generate.stream import end_where_full as end_where_full
from mlx_spec.generate.stream import generate as generate
from mlx_spec.generate.stream import responses as responses
from mlx_spec.generate.stream import stream_generate as stream_generate
from mlx_spec.generate.text_stream import TextStream as TextStream
