"""Lossless speculative decoding for language models on Apple Silicon, in Python on MLX.

engine, tokenizer = load("demo")
for response in stream_generate(engine, tokenizer, prompt, max_tokens=100):
    print(response.text, end="")
"""

from mlx_spec.decoding.grammar import Grammar as Grammar
from mlx_spec.decoding.sampling import Sampling as Sampling
from mlx_spec.engine import Engine as Engine
from mlx_spec.engine import Statistics as Statistics
from mlx_spec.errors import MlxSpecError as MlxSpecError
from mlx_spec.errors import ModelWarning as ModelWarning
from mlx_spec.generate import Conversation as Conversation
from mlx_spec.generate import GenerationResponse as GenerationResponse
from mlx_spec.generate import generate as generate
from mlx_spec.generate import stream_generate as stream_generate
from mlx_spec.generate.best_branch import BestBranch as BestBranch
from mlx_spec.generate.best_branch import Branch as Branch
from mlx_spec.generate.best_branch import best_branch as best_branch
from mlx_spec.loading.load import load as load
