"""Names of a model's tensors, Danlu's and Hugging Face's: the tables that most families share."""

from dataclasses import dataclass

BLOCK, LAYER = "blocks.{layer}", "model.layers.{layer}"


@dataclass(frozen=True)
class TensorNamePair:
    """One kind of tensor by both its names; `{layer}` and `{expert}` are indices."""

    danlu: str
    hf: str
    stack: str = ""
    """Of experts, the name of the one tensor that holds all of them, where a folder has that instead."""

    woven: int | None = None
    """Of a tensor that alternates between two of Danlu's by its last dim, which of the two: 0 or 1."""

    @property
    def per_expert(self) -> bool:
        """Whether Danlu has one tensor for all experts, each matrix transposed, and Hugging Face one per expert."""
        return "{expert}" in self.hf


ENDS = (
    TensorNamePair("embed.token.weight", "model.embed_tokens.weight"),
    TensorNamePair("head.norm.weight", "model.norm.weight"),
    TensorNamePair("head.score.weight", "lm_head.weight"),
)
ATTENTION = (
    TensorNamePair(f"{BLOCK}.attention_norm.weight", f"{LAYER}.input_layernorm.weight"),
    *(
        TensorNamePair(f"{BLOCK}.attention.{letter}.{kind}", f"{LAYER}.self_attn.{letter}_proj.{kind}")
        for letter in "qkvo"
        for kind in ("weight", "bias")
    ),
    TensorNamePair(f"{BLOCK}.attention.q_norm.weight", f"{LAYER}.self_attn.q_norm.weight"),
    TensorNamePair(f"{BLOCK}.attention.k_norm.weight", f"{LAYER}.self_attn.k_norm.weight"),
    TensorNamePair(f"{BLOCK}.mlp_norm.weight", f"{LAYER}.post_attention_layernorm.weight"),
)
DENSE = tuple(
    TensorNamePair(f"{BLOCK}.mlp.{matrix}.{kind}", f"{LAYER}.mlp.{matrix}_proj.{kind}")
    for matrix in ("gate", "up", "down")
    for kind in ("weight", "bias")
)
