"""Targets against Hugging Face transformers, which wrote the checkpoints and computed the logits.

``oracles/write_transformers.py`` is how.
"""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_spec.checkpoints.config import read_config
from mlx_spec.errors import ModelError
from mlx_spec.loading.model import read_model
from mlx_spec.target import Target

FOLDERS = sorted((Path(__file__).parent.parent / "oracles" / "transformers").iterdir())


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
@pytest.mark.parametrize("prompt", [0, 41])
def test_logits_equal_transformers(folder: Path, prompt: int) -> None:
    """Zero-centred norms, vision tensors, fused or numbered experts; stretched positions and windows."""
    config = read_config(folder, folder.name, "model", ModelError)
    model = read_model(folder, config, folder.name)
    model.set_dtype(mx.float32)
    target = Target(model, config, folder.name)
    expected = np.load(folder / "expected.npz")
    tokens, sequence, got = expected["tokens"].tolist(), target.open(), []
    target.prefill(sequence, tokens[:prompt], on_rows=lambda rows, _: got.append(target.logits(rows.hidden)))
    while sequence.length < len(tokens):
        rows = target.forward([(sequence, mx.array(tokens[sequence.length :][:16]))])
        # Half of the rows are rejected, and run again in the next pass.
        accepted = rows.prefix(0, -(-rows.counts[0] // 2))
        got.append(target.logits(accepted.hidden))
        target.commit(sequence, accepted)
    np.testing.assert_allclose(np.array(mx.concatenate(got)), expected["logits"], rtol=1e-4, atol=1e-4)
