"""A generation whose prompt is read, so that the next step runs a round."""

from mlx_spec.engine import Engine, Generation, Request


def started(engine: Engine, request: Request) -> Generation:
    """Start a request and read its prompt; where that fails, close it."""
    generation = engine.start(request)
    try:
        engine.read(generation)
    except BaseException:
        engine.close(generation)
        raise
    return generation
