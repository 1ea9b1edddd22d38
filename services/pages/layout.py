"""Where in a worker's KV memory does a token's K and V lie?

One page holds `page_tokens` tokens of every layer of this rank, laid out as

    [kv head][layer][K, V][token][head_dim]

so that a page is one contiguous run of bytes (few, large descriptors), the heads that a tensor-parallel rank
holds are one run of a page (differing tensor-parallel sizes are descriptor arithmetic), and so are the
layers that a pipeline rank holds, head by head.
"""

from dataclasses import dataclass

NOT_QUANTIZED = "none"
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Geometry of one rank's KV pages. Two workers whose layouts map onto each other can hand over."""

    model: str
    """Fingerprint of the model's configuration and weights; peers must agree on it."""
    dtype: str
    page_tokens: int
    layers: tuple[int, ...]
    """Global layer ids held by this rank, ascending."""
    kv_heads: tuple[int, ...]
    """Global KV head ids held by this rank, ascending."""
    head_dim: int
    context_length: int = 0
    """Most tokens of a sequence, by which the keys of some models are turned: peers must agree on it. 0: not
    said."""
    quantize: str = NOT_QUANTIZED
    """As which codes weights are kept: peers must agree on it, since keys and values are made with what those
    stand for."""

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K and V over all layers and heads of this rank."""
        return len(self.layers) * 2 * len(self.kv_heads) * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def page_bytes(self) -> int:
        return self.token_bytes * self.page_tokens

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.page_tokens)
