"""Generating text: prompts in, text segments out. What ``mlx_lm.generate`` offers, with a drafter."""

from mlx_spec.generate.stream import GenerationResponse as GenerationResponse
from mlx_spec.generate.stream import generate as generate
from mlx_spec.generate.stream import stream_generate as stream_generate
