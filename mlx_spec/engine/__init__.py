"""The engine: sequences that go on in rounds of draft, verify, accept and commit."""

from mlx_spec.engine.engine import Engine as Engine
from mlx_spec.engine.generation import Generation as Generation
from mlx_spec.engine.generation import Round as Round
from mlx_spec.engine.request import Request as Request
from mlx_spec.engine.statistics import Statistics as Statistics
