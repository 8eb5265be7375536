"""Small networks over tokens: an image transformer and one for text, each with what it is called with."""

import torch
from torch import nn


class Block(nn.Module):
    """A block as ViT has it: a norm in front of the attention, and one in front of the perceptron."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.first, self.second = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        batch, steps, width = x.shape
        parts = self.qkv(self.first(x)).reshape(batch, steps, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        scores = torch.softmax(q @ k.transpose(-1, -2) * (width // self.heads) ** -0.5, -1)
        x = x + self.out((scores @ v).transpose(1, 2).reshape(batch, steps, width))
        return x + self.inner(self.second(x))


class ImageTransformer(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patches, self.blocks = nn.Conv2d(3, width, 8, 8), nn.Sequential(Block(width), Block(width))
        self.first, self.places = nn.Parameter(torch.randn(1, 1, width)), nn.Parameter(torch.randn(1, 17, width) / 5)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(x.shape[0], -1, -1), x], 1) + self.places
        return self.head(self.norm(self.blocks(x))[:, 0])


class TextEncoder(nn.Module):
    def __init__(self, width: int = 32, steps: int = 12) -> None:
        super().__init__()
        self.words, self.places, self.block = nn.Embedding(60, width), nn.Embedding(steps, width), Block(width)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 3)

    def forward(self, tokens):
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        return self.head(torch.tanh(self.block(self.norm(x))[:, 0]))


def token_network(name: str) -> tuple[nn.Module, torch.Tensor]:
    """Return `vit`, `text` or `encoder` in eval mode, with norms that are not those of the start, and a batch."""
    torch.manual_seed(0)
    if name == "vit":
        model, x = ImageTransformer(), torch.randn(8, 3, 32, 32)
    elif name == "text":
        model, x = TextEncoder(), torch.randint(0, 60, (8, 12))
    else:
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        model, x = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), torch.randn(4, 9, 32)
    for part in model.modules():
        if isinstance(part, nn.LayerNorm):
            nn.init.normal_(part.weight, 1, 0.3)
            nn.init.normal_(part.bias, 0, 0.3)
    return model.eval(), x
