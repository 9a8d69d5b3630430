"""An ONNX graph as a ``torch.nn.Module``: every node becomes PyTorch operators, run in the order of the file."""
