"""Run under ``mlx.launch``: trains a small model, each process on inputs of its own, and prints its weights."""

import json

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from tools.training import first_process, make_optimizer, make_step, processes

STEPS = 3


class Small(nn.Module):
    """A matrix for Muon and a vector for AdamW."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(8, 8, bias=False), nn.RMSNorm(8)

    def __call__(self, x: mx.array) -> mx.array:
        return self.norm(self.fc(x))


def inputs(process: int) -> list[mx.array]:
    """Return the inputs of a process, one for each step."""
    mx.random.seed(10 + process)
    return [mx.random.normal((4, 8)) for _ in range(STEPS)]


def train(*batches: list[mx.array]) -> dict[str, list]:
    """Train on the mean loss of all batches; return the weights."""
    mx.random.seed(0)
    model, optimizer = Small(), make_optimizer()
    optimizer.init(model.trainable_parameters())

    def loss(*xs: mx.array) -> mx.array:
        return sum(mx.mean((model(x) - x) ** 2) for x in xs) / len(xs)

    step = make_step(model, loss, optimizer, {})
    for arrays in zip(*batches, strict=True):
        for part in optimizer.optimizers:
            part.learning_rate = mx.array(0.01)
        mx.eval(step(*arrays))
    return {name: weight.tolist() for name, weight in tree_flatten(model.parameters())}


if __name__ == "__main__":
    rank = processes().rank()
    print(json.dumps({"first": first_process(), "rank": rank, "weights": train(inputs(rank))}), flush=True)
