"""ResNet-50 with LeakyReLU, whose memory benchmark_memory.py measures.

There are two arrangements: "pre-activation" (He et al., arXiv:1603.05027), where a
LeakyReLU follows every normalization; and "post-activation" (He et al.,
arXiv:1512.03385), where one follows two of three, and the sum of a block is activated.
It must not know what is measured.
"""

from mxnet.gluon import HybridBlock, nn

# Blocks, channels and stride of each stage.
STAGES = (3, 256, 1), (4, 512, 2), (6, 1024, 2), (3, 2048, 2)


def sequence(*blocks):
    net = nn.HybridSequential()
    net.add(*blocks)
    return net


def convolution(channels, size=1, stride=1):
    return nn.Conv2D(channels, size, stride, size // 2, use_bias=False)


def norm_and_activation():
    return nn.BatchNorm(), nn.LeakyReLU(0.01)


def body(channels, stride):
    """The bottleneck's convolutions, with what is between them."""
    return (
        convolution(channels // 4),
        *norm_and_activation(),
        convolution(channels // 4, 3, stride),
        *norm_and_activation(),
        convolution(channels),
    )


class PreActivation(HybridBlock):
    """A bottleneck that normalizes and activates before each convolution."""

    def __init__(self, channels, stride, project):
        super().__init__()
        self.activated = sequence(*norm_and_activation())
        self.body = sequence(*body(channels, stride))
        self.shortcut = convolution(channels, 1, stride) if project else None

    def hybrid_forward(self, F, x):
        activated = self.activated(x)
        shortcut = x if self.shortcut is None else self.shortcut(activated)
        return self.body(activated) + shortcut


class PostActivation(HybridBlock):
    """A bottleneck that normalizes after each convolution, and activates the sum."""

    def __init__(self, channels, stride, project):
        super().__init__()
        self.body = sequence(*body(channels, stride), nn.BatchNorm())
        projection = convolution(channels, 1, stride), nn.BatchNorm()
        self.shortcut = sequence(*projection) if project else None
        self.activation = nn.LeakyReLU(0.01)

    def hybrid_forward(self, F, x):
        shortcut = x if self.shortcut is None else self.shortcut(x)
        return self.activation(self.body(x) + shortcut)


BLOCKS = {"pre-activation": PreActivation, "post-activation": PostActivation}


def resnet50(arrangement):
    """The net, not initialized: 49 convolutions on the main path and a dense layer."""
    block = BLOCKS[arrangement]
    blocks = [
        block(channels, stride if first else 1, project=first)
        for count, channels, stride in STAGES
        for first in [True] + [False] * (count - 1)
    ]
    stem = convolution(64, 7, 2), *norm_and_activation(), nn.MaxPool2D(3, 2, 1)
    last = norm_and_activation() if block is PreActivation else ()
    return sequence(*stem, *blocks, *last, nn.GlobalAvgPool2D(), nn.Dense(10))
