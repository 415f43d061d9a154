"""Shapes of dense decoders: what a model costs, in parameters and bytes.

A layer's linears are q, k, v, o, gate, up and down:

    layer_params = 2·hidden·heads·head_dim + 2·hidden·kv_heads·head_dim + 3·hidden·ffn
    kv_elements  = 2·layers·kv_heads·head_dim      per token in the cache

Norms and biases, below 0.01 % of a model, are left out. Source: config.json of each model.
"""

from dataclasses import dataclass

from labkit.config.errors import did_you_mean


@dataclass(frozen=True)
class Shape:
    label: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool  # the lm_head is the embedding

    @property
    def layer_params(self) -> int:
        projections = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return projections + 3 * self.hidden * self.ffn

    @property
    def head_params(self) -> int:
        return self.hidden * self.vocab

    @property
    def params(self) -> int:
        return self.layers * self.layer_params + self.head_params * (1 if self.tied else 2)

    @property
    def kv_elements(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim

    @property
    def inputs(self) -> tuple[int, ...]:
        """The lengths that the linears sum over, of q/k/v and gate/up, o, and down."""
        return self.hidden, self.heads * self.head_dim, self.ffn


SHAPES = {
    "tiny": Shape("tiny", 4, 128, 4, 2, 32, 384, 32, tied=False),
    "smollm2-135m": Shape("SmolLM2-135M", 30, 576, 9, 3, 64, 1536, 49152, tied=True),
    "qwen3-0.6b": Shape("Qwen3-0.6B", 28, 1024, 16, 8, 128, 3072, 151936, tied=True),
    "qwen3-1.7b": Shape("Qwen3-1.7B", 28, 2048, 16, 8, 128, 6144, 151936, tied=True),
    "qwen3-8b": Shape("Qwen3-8B", 36, 4096, 32, 8, 128, 12288, 151936, tied=False),
    "llama-3.1-8b": Shape("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14336, 128256, tied=False),
}


def shape_named(name: str) -> Shape:
    if name not in SHAPES:
        raise ValueError(f"shape: no {name!r}; {did_you_mean(name, SHAPES)}")
    return SHAPES[name]
