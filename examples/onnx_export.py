"""A trained net as an ONNX file, checked with onnxruntime.

    pip install 'onnx==1.13.1' 'onnxruntime==1.18.1'
    python examples/onnx_export.py digits.onnx

MXNet writes its own BatchNorm to ONNX, so the layers are changed back first.
"""

import argparse
import tempfile
from pathlib import Path

import gluon_syncbn  # first, so that MXNet works with today's NumPy

import mxnet as mx
import numpy as np
import onnx
import onnxruntime
from mxnet import autograd, gluon
from mxnet.gluon import nn


def make_net():
    net = nn.HybridSequential()
    net.add(nn.Conv2D(16, 3), nn.BatchNorm(), nn.Activation("relu"))
    net.add(nn.GlobalAvgPool2D(), nn.Dense(10))
    return net


def train(net, x):
    """A few steps, so that running statistics are those of data."""
    parallel = gluon_syncbn.make_parallel(net, [mx.cpu(0), mx.cpu(1)])
    parallel.initialize(mx.init.Xavier())
    trainer = gluon.Trainer(net.collect_params(), "sgd")
    for _ in range(5):
        with autograd.record():
            loss = parallel(x).square()
        loss.backward()
        trainer.step(len(x))


def export_onnx(net, shape, file):
    """Writes a net of BatchNorm that was hybridized and called."""
    with tempfile.TemporaryDirectory() as folder:
        prefix = str(Path(folder, "net"))
        net.export(prefix)
        symbol, parameters = f"{prefix}-symbol.json", f"{prefix}-0000.params"
        mx.onnx.export_model(symbol, parameters, [shape], [np.float32], file)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file")
    file = parser.parse_args().file
    mx.random.seed(0)
    x = mx.nd.random.normal(1, 2, shape=(5, 1, 8, 8))
    net = make_net()
    train(net, x)
    gluon_syncbn.revert_sync_batchnorm(net)
    net.hybridize()
    expected = net(x).asnumpy()
    export_onnx(net, x.shape, file)

    onnx.checker.check_model(onnx.load(file))
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3  # MXNet lists the weights as inputs: warnings
    session = onnxruntime.InferenceSession(
        file, settings, providers=["CPUExecutionProvider"]
    )
    (result,) = session.run(None, {"data": x.asnumpy()})
    print(f"onnxruntime differs by {abs(result - expected).max():.1e}")


if __name__ == "__main__":
    main()
