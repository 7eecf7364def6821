"""The Llama family: a decoder of RMSNorm, rotary grouped-query attention and SwiGLU, in plain torch.

Nothing here knows of a mesh. What a partitioner needs to know of the model is data beside it: the logical axes of
parameters and activations, and the initial values.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from ._init import Constant, Normal
from ._loss import InOrder, chunked_cross_entropy
from ._rope import RopeScaling, apply_rotary, rotary_tables

DEFAULT_RULES: tuple[tuple[str, str | tuple[str, ...] | None], ...] = (
    ("batch", ("data", "fsdp")),
    ("seq", "context"),
    ("embed", "fsdp"),
    ("heads", "tensor"),
    ("kv_heads", "tensor"),
    ("mlp", "tensor"),
    ("vocab", "tensor"),
    ("act_embed", None),
    ("norm", None),
)
"""Which mesh axes hold which logical axis; None replicates."""


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of a Llama.

    Raises:
      ValueError: A size is not positive, `num_kv_heads` does not divide `num_heads`, or `head_dim` is odd.
    """

    vocab_size: int
    """Number of token ids."""
    num_layers: int
    """Number of decoder layers."""
    embed_dim: int
    """Width of the residual stream."""
    num_heads: int
    """Number of query heads."""
    num_kv_heads: int
    """Number of key and value heads; each serves `num_heads / num_kv_heads` query heads (arXiv:2305.13245)."""
    head_dim: int
    """Width of a head; even."""
    mlp_dim: int
    """Width inside the feed-forward block."""
    max_seq_len: int
    """Longest sequence that the model accepts, in tokens."""
    norm_eps: float = 1e-5
    """Added to the mean square in every RMSNorm."""
    rope_theta: float = 500_000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """Llama 3.1's stretch of the slow rotary frequencies, or None."""
    tie_embeddings: bool = False
    """Whether the output projection is the embedding."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name not in ("rope_scaling", "tie_embeddings") and value <= 0:
                raise ValueError(
                    f"{name} must be positive.\n"
                    f"  got: {name}={value}\n"
                    "  fix: use a positive value; shardtorch.models.PRESETS has complete examples."
                )
        if self.num_heads % self.num_kv_heads:
            divisors = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            raise ValueError(
                "num_kv_heads must divide num_heads: every key head serves equally many query heads.\n"
                f"  got: num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}\n"
                f"  fix: use one of {', '.join(map(str, divisors))} for num_kv_heads."
            )
        if self.head_dim % 2:
            raise ValueError(
                "head_dim must be even: rotary embedding turns pairs.\n"
                f"  got: head_dim={self.head_dim}\n"
                f"  fix: use {self.head_dim + 1}."
            )

    @property
    def _num_layer_matmul_parameters(self) -> int:
        attention = 2 * self.embed_dim * self.head_dim * (self.num_heads + self.num_kv_heads)
        return attention + 3 * self.embed_dim * self.mlp_dim

    @property
    def num_parameters(self) -> int:
        """Number of trainable elements; a tied embedding counts once."""
        embeddings = self.vocab_size * self.embed_dim * (1 if self.tie_embeddings else 2)
        norms = (2 * self.num_layers + 1) * self.embed_dim
        return embeddings + norms + self.num_layers * self._num_layer_matmul_parameters

    def flops_per_token(self, seq_len: int, causal: bool = True) -> float:
        """Floating-point operations that training on one token takes, forward and backward.

            6 * matmul_parameters + 12 * num_layers * num_heads * head_dim * seq_len

        The backward pass costs twice the forward pass, and a multiply-add is two operations: 3 * 2 per weight that a
        token is multiplied with. That includes the output projection, tied or not, and excludes the embedding, which
        is a lookup. The second term is `q @ k` and `scores @ v`: 3 * 4 operations per head, head dim and position
        attended to. Source: PaLM, appendix B (arXiv:2204.02311). What is repeated to save memory does not count, nor
        do norms, rotations, softmax and the optimizer.

        Args:
          seq_len: Sequence length, in tokens.
          causal: A token attends to half the sequence on average, so the second term is halved. PaLM counts it whole.
        """
        matmul_parameters = self.num_layers * self._num_layer_matmul_parameters + self.vocab_size * self.embed_dim
        attention = 12 * self.num_layers * self.num_heads * self.head_dim * seq_len
        return float(6 * matmul_parameters + (attention / 2 if causal else attention))


class RMSNorm(nn.Module):
    """`x / rms(x) * weight` over the last dim (arXiv:1910.07467), in float32 inside; the dtype of `x` comes out.

    So bfloat16 activations stay bfloat16 beside a float32 weight, as a carry through a scan over layers has to.
    """

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Float[Tensor, "*dims embed"]) -> Float[Tensor, "*dims embed"]:
        x_up = x.to(torch.promote_types(x.dtype, torch.float32))
        inverse_rms = torch.rsqrt(x_up.square().mean(dim=-1, keepdim=True) + self.eps)
        return (x_up * inverse_rms * self.weight).to(x.dtype)


class CausalAttention(nn.Module):
    """Softmax attention of each position to itself and those before it.

    It has no parameters; it is a module so that another implementation can take its place, and so that its output
    can be constrained.
    """

    def forward(
        self,
        q: Float[Tensor, "batch heads seq head_dim"],
        k: Float[Tensor, "batch kv_heads seq head_dim"],
        v: Float[Tensor, "batch kv_heads seq head_dim"],
    ) -> Float[Tensor, "batch heads seq head_dim"]:
        """Query head `h` reads key and value head `h // (heads / kv_heads)`; scores are times `head_dim ** -0.5`."""
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Attention(nn.Module):
    """Grouped-query self-attention with rotary positions."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        heads_dim, kv_heads_dim = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.wq = nn.Linear(config.embed_dim, heads_dim, bias=False)
        self.wk = nn.Linear(config.embed_dim, kv_heads_dim, bias=False)
        self.wv = nn.Linear(config.embed_dim, kv_heads_dim, bias=False)
        self.wo = nn.Linear(heads_dim, config.embed_dim, bias=False)
        self.attend = CausalAttention()

    def forward(
        self, x: Float[Tensor, "batch seq embed"], cos: Float[Tensor, "seq half"], sin: Float[Tensor, "seq half"]
    ) -> Float[Tensor, "batch seq embed"]:
        q, k, v = (
            rearrange(w(x), "batch seq (heads head_dim) -> batch heads seq head_dim", head_dim=self.head_dim)
            for w in (self.wq, self.wk, self.wv)
        )
        attended = self.attend(apply_rotary(q, cos, sin), apply_rotary(k, cos, sin), v)
        return self.wo(rearrange(attended, "batch heads seq head_dim -> batch seq (heads head_dim)"))


class MLP(nn.Module):
    """SwiGLU feed-forward block (arXiv:2002.05202)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.w_gate = nn.Linear(config.embed_dim, config.mlp_dim, bias=False)
        self.w_up = nn.Linear(config.embed_dim, config.mlp_dim, bias=False)
        self.w_down = nn.Linear(config.mlp_dim, config.embed_dim, bias=False)

    def forward(self, x: Float[Tensor, "batch seq embed"]) -> Float[Tensor, "batch seq embed"]:
        return self.w_down(F.silu(self.w_gate(x)) * self.w_up(x))


class LlamaLayer(nn.Module):
    """One decoder layer. It does not depend on its index, so a scan over stacked weights can stand for all layers."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.embed_dim, config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.embed_dim, config.norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, x: Float[Tensor, "batch seq embed"], cos: Float[Tensor, "seq half"], sin: Float[Tensor, "seq half"]
    ) -> Float[Tensor, "batch seq embed"]:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class ChunkedLoss(nn.Module):
    """`chunked_cross_entropy` as a module without parameters, so that another implementation can take its place."""

    def __init__(self) -> None:
        super().__init__()
        self.num_groups: tuple[int, int] = (1, 1)
        """Into how many parts batch and sequence are divided, where devices shard them; see `chunked_cross_entropy`."""
        self.in_order: InOrder = list
        """Keeps the chunks apart where a compiler chooses the order; see `chunked_cross_entropy`."""

    def forward(
        self,
        x: Float[Tensor, "batch seq embed"],
        weight: Float[Tensor, "vocab embed"],
        targets: Int[Tensor, "batch seq"],
        num_chunks: int,
        reduction: Literal["mean", "sum"],
    ) -> Float[Tensor, ""]:
        groups = self.num_groups if torch.is_grad_enabled() else (1, 1)
        return chunked_cross_entropy(
            x, weight, targets, num_chunks, reduction=reduction, num_groups=groups, in_order=self.in_order
        )


class Llama(nn.Module):
    """A Llama decoder.

    Parameters, with weights of projections as `torch.nn.Linear` holds them, `[out, in]`, and no biases: `embed.weight`,
    `layers.N.attention_norm.weight`, `layers.N.attention.{wq,wk,wv,wo}.weight`, `layers.N.mlp_norm.weight`,
    `layers.N.mlp.{w_gate,w_up,w_down}.weight`, `norm.weight`, and `head.weight` unless tied to `embed.weight`.

    Construction under `torch.device("meta")` takes no memory, and there are no buffers: all state is parameters. On a
    real device parameters start with torch's defaults; `initializers` names the values they should start with.

    Args:
      config: The shape.

    >>> from shardtorch.models import preset
    >>> model = Llama(preset("llama-tiny"))
    >>> tokens = torch.randint(0, 2048, (1, 17))
    >>> model(tokens[:, :-1]).shape
    torch.Size([1, 16, 2048])
    >>> model(tokens[:, :-1], targets=tokens[:, 1:]).shape
    torch.Size([])
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.embed_dim)
        self.layers = nn.ModuleList(LlamaLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.embed_dim, config.norm_eps)
        self.head = nn.Linear(config.embed_dim, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight
        self.loss = ChunkedLoss()

    def forward(
        self,
        tokens: Int[Tensor, "batch seq"],
        targets: Int[Tensor, "batch seq"] | None = None,
        *,
        loss_chunks: int = 8,
        reduction: Literal["mean", "sum"] = "mean",
    ) -> Float[Tensor, "batch seq vocab"] | Float[Tensor, ""]:
        """Logits, or with `targets` the loss, for which the logits never exist as a whole.

        Args:
          tokens: Token ids.
          targets: Token id that should follow each token; -100 leaves a position out.
          loss_chunks: In how many pieces along the sequence the loss is computed; divides `seq`. Only with targets.
          reduction: "mean" over the targets, or their "sum". Only with targets.

        Returns:
          Without targets, logits in the dtype of the weights. With targets, the negative log-likelihood in nats,
          a float32 scalar.

        Raises:
          ValueError: The sequence is longer than `max_seq_len`, or `loss_chunks` does not divide it.
        """
        config, seq_len = self.config, tokens.shape[1]
        if seq_len > config.max_seq_len:
            raise ValueError(
                f"a sequence may have at most max_seq_len={config.max_seq_len} tokens.\n"
                f"  got: tokens of shape {tuple(tokens.shape)}\n"
                "  fix: cut the sequences, or build the model with a larger max_seq_len."
            )
        cos, sin = rotary_tables(seq_len, config.head_dim, config.rope_theta, config.rope_scaling, device=tokens.device)
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        x = self.norm(x)
        if targets is None:
            return self.head(x)
        return self.loss(x, self.head.weight, targets, loss_chunks, reduction)

    def initializers(self) -> dict[str, Normal | Constant]:
        """Initial values by pattern of parameter names, in which `*` is one dotted segment.

        Projections keep the variance of what they read (standard deviation `fan_in ** -0.5`). The two that write to the
        residual stream, of which there are `2 * num_layers`, share that variance among them, as in GPT-2.
        """
        config = self.config
        share = (2 * config.num_layers) ** -0.5
        from_embed = Normal(config.embed_dim**-0.5)
        initializers: dict[str, Normal | Constant] = {
            "embed.weight": from_embed if config.tie_embeddings else Normal(1.0),
            "layers.*.attention_norm.weight": Constant(1.0),
            "layers.*.attention.wq.weight": from_embed,
            "layers.*.attention.wk.weight": from_embed,
            "layers.*.attention.wv.weight": from_embed,
            "layers.*.attention.wo.weight": Normal(share * (config.num_heads * config.head_dim) ** -0.5),
            "layers.*.mlp_norm.weight": Constant(1.0),
            "layers.*.mlp.w_gate.weight": from_embed,
            "layers.*.mlp.w_up.weight": from_embed,
            "layers.*.mlp.w_down.weight": Normal(share * config.mlp_dim**-0.5),
            "norm.weight": Constant(1.0),
        }
        if not config.tie_embeddings:
            initializers["head.weight"] = from_embed
        return initializers

    def parameter_axes(self) -> dict[str, tuple[str | None, ...]]:
        """Logical axis of every dim of every parameter, by pattern of parameter names (`*` is one dotted segment)."""
        axes: dict[str, tuple[str | None, ...]] = {
            "embed.weight": ("vocab", "embed"),
            "layers.*.attention_norm.weight": ("norm",),
            "layers.*.attention.wq.weight": ("heads", "embed"),
            "layers.*.attention.wk.weight": ("kv_heads", "embed"),
            "layers.*.attention.wv.weight": ("kv_heads", "embed"),
            "layers.*.attention.wo.weight": ("embed", "heads"),
            "layers.*.mlp_norm.weight": ("norm",),
            "layers.*.mlp.w_gate.weight": ("mlp", "embed"),
            "layers.*.mlp.w_up.weight": ("mlp", "embed"),
            "layers.*.mlp.w_down.weight": ("embed", "mlp"),
            "norm.weight": ("norm",),
        }
        if not self.config.tie_embeddings:
            axes["head.weight"] = ("vocab", "embed")
        return axes

    def activation_axes(self) -> dict[str, tuple[str | None, ...]]:
        """Logical axis of every dim of what a module returns, by pattern of module paths (`*` is one dotted segment).

        `head` runs only when logits are asked for; the loss reads its weight.
        """
        residual = ("batch", "seq", "act_embed")
        return {
            "embed": residual,
            "layers.*": residual,
            "layers.*.attention_norm": residual,
            "layers.*.attention.wq": ("batch", "seq", "heads"),
            "layers.*.attention.wk": ("batch", "seq", "kv_heads"),
            "layers.*.attention.wv": ("batch", "seq", "kv_heads"),
            "layers.*.attention.attend": ("batch", "heads", "seq", None),
            "layers.*.attention": residual,
            "layers.*.mlp_norm": residual,
            "layers.*.mlp.w_gate": ("batch", "seq", "mlp"),
            "layers.*.mlp.w_up": ("batch", "seq", "mlp"),
            "layers.*.mlp": residual,
            "norm": residual,
            "head": ("batch", "seq", "vocab"),
        }
