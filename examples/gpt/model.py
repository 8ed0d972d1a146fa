"""A small GPT, byte level: the whole model on one page."""

from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Causal self-attention, then a two-layer perceptron, each added to its input."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, time, width) to the same shape."""
        batch, time, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, time, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        x = x + self.out(y.transpose(1, 2).reshape(batch, time, width))
        return x + self.mlp(self.norm_mlp(x))


class Embedding(nn.Module):
    """What a byte is, plus where it stands."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(context, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (batch, time) of bytes to (batch, time, width)."""
        return self.token(tokens) + self.position.weight[: tokens.shape[1]]


class Head(nn.Module):
    """The logits of the next byte."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, time, width) to (batch, time, 256)."""
        return self.head(self.norm(x))


class GPT(nn.Sequential):
    """Bytes in, the logits of the next byte out: blocks called in order, so it can be cut."""

    def __init__(
        self,
        *,
        layers: int,
        width: int,
        heads: int,
        context: int,
        dropout: float = 0.1,
        tied: bool = False,
    ) -> None:
        embedding, head = Embedding(width, context), Head(width)
        if tied:  # Both ends have one matrix, wherever the blocks are cut.
            head.head.weight = embedding.token.weight
            nn.init.normal_(embedding.token.weight, std=0.02)
        super().__init__(embedding, *(Block(width, heads, dropout) for _ in range(layers)), head)
