"""A small detector with the head of YOLOv8: boxes and class scores meet in one Concat that leaves the model."""

import torch
from torch import Tensor, nn

CLASSES, BINS = 20, 16


def conv_silu(inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.SiLU())


class Split2(nn.Module):
    """The C2f block with one bottleneck: half of the channels pass by."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        half = channels // 2
        self.enter, self.leave = conv_silu(channels, channels, 1), conv_silu(3 * half, channels, 1)
        self.inner = nn.Sequential(conv_silu(half, half), conv_silu(half, half))

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.enter(x).chunk(2, 1)
        return self.leave(torch.cat([left, right, right + self.inner(right)], 1))


class Detector(nn.Module):
    """[N, 3, H, W] -> [N, 4 + classes, anchors]: boxes in pixels, then class scores."""

    def __init__(self, width: int = 16, size: int = 64) -> None:
        super().__init__()
        widths = (width, 2 * width, 4 * width)
        self.stem = conv_silu(3, width, stride=2)
        self.stages = nn.ModuleList()
        before = width
        for channels in widths:
            self.stages.append(nn.Sequential(conv_silu(before, channels, stride=2), Split2(channels)))
            before = channels
        self.up = nn.Upsample(scale_factor=2.0, mode="nearest")
        self.join = conv_silu(widths[2] + widths[1], widths[1], 1)
        channels = (widths[0], widths[1], widths[2])
        self.boxes = nn.ModuleList(nn.Sequential(conv_silu(c, 32), nn.Conv2d(32, 4 * BINS, 1)) for c in channels)
        self.scores = nn.ModuleList(nn.Sequential(conv_silu(c, 32), nn.Conv2d(32, CLASSES, 1)) for c in channels)
        for head in self.scores:
            nn.init.constant_(head[-1].bias, -4.0)
        self.expect = nn.Conv2d(BINS, 1, 1, bias=False)
        self.expect.weight.data[:] = torch.arange(BINS, dtype=torch.float32).reshape(1, BINS, 1, 1)
        points, strides = [], []
        for stride in (4, 8, 16):
            cells = torch.arange(size // stride) + 0.5
            y, x = torch.meshgrid(cells, cells, indexing="ij")
            points.append(torch.stack([x.flatten(), y.flatten()]))
            strides.append(torch.full((1, cells.numel() ** 2), float(stride)))
        self.register_buffer("points", torch.cat(points, 1))
        self.register_buffer("strides", torch.cat(strides, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        fine = self.stages[0](x)
        middle = self.stages[1](fine)
        coarse = self.stages[2](middle)
        levels = [fine, self.join(torch.cat([self.up(coarse), middle], 1)), coarse]
        found = [
            torch.cat([boxes(level), scores(level)], 1).flatten(2)
            for level, boxes, scores in zip(levels, self.boxes, self.scores, strict=True)
        ]
        boxes, scores = torch.cat(found, 2).split((4 * BINS, CLASSES), 1)
        batch, _, anchors = boxes.shape
        weights = boxes.view(batch, 4, BINS, anchors).transpose(2, 1).softmax(1)
        low, high = self.expect(weights).view(batch, 4, anchors).chunk(2, 1)
        left, right = self.points - low, self.points + high
        decoded = torch.cat([(left + right) / 2, right - left], 1) * self.strides
        return torch.cat([decoded, scores.sigmoid()], 1)


def trained_like() -> Detector:
    """A detector with settled batch statistics and heads that are confident here and there, as trained ones are."""
    torch.manual_seed(0)
    model = Detector()
    with torch.no_grad():
        for _ in range(8):
            model(torch.randn(8, 3, 64, 64))
        for head in model.scores:
            head[-1].weight.mul_(16.0)
    return model.eval()
