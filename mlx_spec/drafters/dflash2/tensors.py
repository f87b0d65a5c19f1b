"""From the tensors of a checkpoint to those of our modules: names."""

import mlx.core as mx

# Tensors that the speculators layout may carry although they are the target's own.
TARGET_TENSORS = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight")
RENAMED = (("midlayer.", "layers.0."), ("encoder.fc.", "fc."), ("encoder.output_norm_enc.", "hidden_norm."))


def native_names(tensors: dict[str, mx.array], from_speculators: bool = False) -> dict[str, mx.array]:
    """Return tensors of any known layout under the names of our modules.

    from_speculators: the layout is that of ``speculators``, whose files may carry tensors of the target.
    """
    renamed = {}
    for name, value in tensors.items():
        if from_speculators and name in TARGET_TENSORS:
            continue
        name = name.removeprefix("model.")
        for old, new in RENAMED:
            if name.startswith(old):
                name = new + name.removeprefix(old)
        renamed[f"{name}.weight" if name.endswith("_codebook") else name] = value
    return renamed
