"""What a model has beyond a plain decoder, as far as only some families have it."""

from danlu.spec.model import Model


def model_traits(model: Model) -> dict[str, str]:
    """Names of a model's traits, and each as a text that follows "has"."""
    moe = model.moe
    traits = {
        "norm": (f'norm = "{model.norm}"', model.norm != "rms"),
        "position": (f'position = "{model.position}"', model.position != "rope"),
        model.activation: (f'activation = "{model.activation}"', model.activation != "swiglu"),
        "bias": ("bias", model.bias),
        "qkv_bias": ("qkv_bias", model.qkv_bias),
        "qk_norm": ("qk_norm", model.qk_norm),
        "mla": ("[model.mla]", model.mla is not None),
        "window": ("window", model.window is not None),
        "window.mixed": ("layers with a window and others without", model.mixes_windows),
        "local_rope_theta": ("local_rope_theta", model.local_rope_theta is not None),
        "sinks": ("sinks", model.sinks),
        "score_softcap": ("score_softcap", model.score_softcap is not None),
        "logit_softcap": ("logit_softcap", model.logit_softcap is not None),
        "query_scalar": ("query_scalar", model.query_scalar is not None),
        "zero_centered_norm": ("zero_centered_norm", model.zero_centered_norm),
        "post_norms": ("post_norms", model.post_norms),
        "scaled_embedding": ("scaled_embedding", model.scaled_embedding),
    }
    if moe is not None:
        traits |= {
            "moe": ("[model.moe]", True),
            "moe.bias": ("moe.bias", moe.bias),
            "moe.shared": (f"moe.shared = {moe.shared}", moe.shared > 0),
            "moe.dense_layers": (f"moe.dense_layers = {moe.dense_layers}", moe.dense_layers > 0),
            "moe.score": (f'moe.score = "{moe.score}"', moe.score != "softmax"),
            "moe.normalize": ("moe.normalize = false", not moe.normalize),
            "moe.routed_scaling_factor": (
                f"moe.routed_scaling_factor = {moe.routed_scaling_factor}",
                moe.routed_scaling_factor != 1.0,
            ),
            "moe.n_group": (f"moe.n_group = {moe.n_group}", moe.n_group > 1),
            "moe.balance": ('moe.balance = "bias"', moe.balance == "bias"),
        }
    return {name: text for name, (text, has) in traits.items() if has}
