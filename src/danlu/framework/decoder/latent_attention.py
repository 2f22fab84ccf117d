"""Multi-head latent attention (DeepSeek-AI, "DeepSeek-V2", 2024): keys and values are projections of a narrow latent.

Shapes: B sequences, S tokens of each, D width of the hidden states, H heads, W width of a head's query and key, V width
of its value, C width of the latent, R features that are rotated. Where heads or sequence are sharded, the same code
runs on the shard.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from danlu.framework.decoder.attention import Documents
from danlu.framework.decoder.kv_cache import KVCache
from danlu.framework.decoder.norm import RMSNorm
from danlu.framework.decoder.rope import apply_rope
from danlu.ops.operators.masked_attention import masked_attention
from danlu.spec.model import Model, RopeScaling

LATENT_NORM_EPSILON = 1e-6
"""Of the norms of the latents, whatever that of the hidden states is: published models have them so."""


class LatentCoreAttention(nn.Module):
    """Causal attention over full sequences whose heads are rotated in their last features only.

    Context parallelism wraps it.
    """

    def __init__(self, rotated: int, scale: float, theta: float, scaling: RopeScaling | None) -> None:
        super().__init__()
        self.rotated, self.scale = rotated, scale
        self.theta, self.scaling = theta, scaling

    def forward(self, q_BSHW: Tensor, k_BSHW: Tensor, v_BSHV: Tensor, documents: Documents | None = None) -> Tensor:
        """Attend; the result has the shape of `v_BSHV`."""
        positions_BS, first_BS = (None, None) if documents is None else documents[:2]
        q, k = (self._rotate_last(x, positions_BS) for x in (q_BSHW, k_BSHW))
        # Kernels that keep no scores in memory want one width: what zeros add to a value is cut off again.
        width, v_width = q.shape[-1], v_BSHV.shape[-1]
        missing, beyond = max(0, width - v_width), max(0, v_width - width)
        q, k = (F.pad(x, (0, beyond)) if beyond else x for x in (q, k))
        v = F.pad(v_BSHV, (0, missing)) if missing else v_BSHV
        if first_BS is not None:
            return masked_attention(q, k, v, first_BS, self.scale)[..., :v_width]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return attended.transpose(1, 2)[..., :v_width]

    def rotate(self, x_BSHR: Tensor, positions_BS: Tensor | None) -> Tensor:
        """Apply positions to features of which two neighbors are one pair; they count from 0 unless they are given."""
        return apply_rope(x_BSHR, self.theta, self.scaling, positions_BS, interleaved=True)

    def _rotate_last(self, x_BSHW: Tensor, positions_BS: Tensor | None) -> Tensor:
        plain, rotated = x_BSHW.split((x_BSHW.shape[-1] - self.rotated, self.rotated), dim=-1)
        return torch.cat((plain, self.rotate(rotated, positions_BS)), dim=-1)


class LatentInputs(nn.Module):
    """Passes on what the up-projections read; tensor parallelism gathers it here, all in one collective."""

    def forward(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """The same tensors."""
        return parts


class LatentAttention(nn.Module):
    """Causal self-attention with latent keys and values, and latent queries if `q_lora_rank` is given.

    Its cache keeps the latent and the rotated key that all heads share.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        assert model.mla is not None
        self.mla = mla = model.mla
        heads, width = model.heads, model.width
        self.q_a = nn.Linear(width, mla.q_lora_rank, bias=False) if mla.q_lora_rank else None
        self.q_a_norm = RMSNorm(mla.q_lora_rank, eps=LATENT_NORM_EPSILON) if mla.q_lora_rank else None
        self.q_b = nn.Linear(mla.q_lora_rank, heads * mla.qk_head_dim, bias=False) if mla.q_lora_rank else None
        self.q = None if mla.q_lora_rank else nn.Linear(width, heads * mla.qk_head_dim, bias=False)
        self.kv_a = nn.Linear(width, mla.kv_lora_rank + mla.qk_rope_head_dim, bias=False)
        self.kv_a_norm = RMSNorm(mla.kv_lora_rank, eps=LATENT_NORM_EPSILON)
        self.kv_b = nn.Linear(mla.kv_lora_rank, heads * (mla.qk_nope_head_dim + mla.v_head_dim), bias=False)
        self.inputs = LatentInputs()
        scale = mla.qk_head_dim**-0.5 * (model.rope_scaling.score_factor if model.rope_scaling else 1.0)
        self.core = LatentCoreAttention(mla.qk_rope_head_dim, scale, model.rope_theta, model.rope_scaling)
        self.o = nn.Linear(heads * mla.v_head_dim, width, bias=False)

    def forward(self, x_BSD: Tensor, documents: Documents | None = None) -> Tensor:
        """Mix information between positions."""
        q_BSHW, latent_BSC, k_BSR = self._project(x_BSD)
        return self.o(self.core(q_BSHW, *self._expand(latent_BSC, k_BSR), documents).flatten(2))

    def new_cache(self, sequences: int, length: int) -> KVCache:
        """An empty cache for as many sequences of at most `length` positions."""
        shape = (sequences, length, 1, self.mla.kv_lora_rank)
        weight = self.kv_a.weight
        return KVCache(shape, weight.dtype, weight.device, value_width=self.mla.qk_rope_head_dim)

    def extend(self, x_BSD: Tensor, cache: KVCache) -> Tensor:
        """As `forward` at the positions after those in the cache, to which these are added."""
        first, new = cache.length, x_BSD.shape[1]
        q_BSHW, latent_BSC, k_BSR = self._project(x_BSD)
        positions_1S = torch.arange(first, first + new, device=x_BSD.device)[None]
        rotated_BS1R = self.core.rotate(k_BSR[:, :, None], positions_1S)
        latent_BS1C, rotated_BS1R = cache.append(latent_BSC[:, :, None], rotated_BS1R)
        if first == 0:
            return self.o(self.core(q_BSHW, *self._expand(latent_BSC, k_BSR)).flatten(2))
        return self.o(self._attend_to_latent(q_BSHW, positions_1S, latent_BS1C, rotated_BS1R).flatten(2))

    def _project(self, x_BSD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of every head, the latent of keys and values, and the shared key before its rotation."""
        q_input, project = x_BSD, self.q
        if self.q_a is not None and self.q_a_norm is not None:
            q_input, project = self.q_a_norm(self.q_a(x_BSD)), self.q_b
        assert project is not None
        latent_BSC, k_BSR = self.kv_a(x_BSD).split((self.mla.kv_lora_rank, self.mla.qk_rope_head_dim), dim=-1)
        q_input, latent_BSC, k_BSR = self.inputs(q_input, self.kv_a_norm(latent_BSC), k_BSR)
        return project(q_input).unflatten(-1, (-1, self.mla.qk_head_dim)), latent_BSC, k_BSR

    def _expand(self, latent_BSC: Tensor, k_BSR: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of every head."""
        widths = (self.mla.qk_nope_head_dim, self.mla.v_head_dim)
        k_BSHN, v_BSHV = self.kv_b(latent_BSC).unflatten(-1, (-1, sum(widths))).split(widths, dim=-1)
        shared = k_BSR[:, :, None].expand(-1, -1, k_BSHN.shape[2], -1)
        return torch.cat((k_BSHN, shared), dim=-1), v_BSHV

    def _attend_to_latent(self, q_BSHW: Tensor, positions_1S: Tensor, latent_BTC: Tensor, k_BTR: Tensor) -> Tensor:
        """Attend to T cached positions without expanding them: `kv_b` is applied to queries and results instead.

        A head's score is qᵀ(K·latent) = (Kᵀq)ᵀ·latent, and its result the sum of V·latent: V times the sum.
        """
        mla, new, cached = self.mla, q_BSHW.shape[1], latent_BTC.shape[1]
        up_k, up_v = self.kv_b.weight.unflatten(0, (q_BSHW.shape[2], -1)).split(
            (mla.qk_nope_head_dim, mla.v_head_dim), dim=1
        )
        q_BSHN, q_BSHR = q_BSHW.split((mla.qk_nope_head_dim, mla.qk_rope_head_dim), dim=-1)
        q_BSHC = torch.einsum("bshn,hnc->bshc", q_BSHN, up_k)
        q = torch.cat((q_BSHC, self.core.rotate(q_BSHR, positions_1S)), dim=-1).transpose(1, 2)
        k, v = torch.cat((latent_BTC, k_BTR), dim=-1).transpose(1, 2), latent_BTC.transpose(1, 2)
        # The i-th new position sees everything cached before it, and itself.
        seen = None
        if new > 1:
            seen = torch.ones(new, cached, dtype=torch.bool, device=q.device).tril(cached - new)
        y = F.scaled_dot_product_attention(q, k, v, seen, scale=self.core.scale, enable_gqa=True)
        return torch.einsum("bhsc,hvc->bshv", y, up_v)
