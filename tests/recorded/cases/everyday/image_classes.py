"""Images and labels of classes of their own, as fastai, MONAI and torchvision's tv_tensors make them."""

import torch
from torch import nn

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Image(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})

    def brightened(self, by):
        return (self * by).clamp(0, 1)


class Volume(torch.Tensor):
    """With where it was taken."""

    @staticmethod
    def __new__(cls, values, spacing=None):
        return torch.as_tensor(values).as_subclass(cls)

    def __init__(self, values, spacing=None):
        self.spacing = spacing

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        made = super().__torch_function__(func, types, args, kwargs)
        if isinstance(made, Volume):
            made.spacing = next((arg.spacing for arg in args if isinstance(arg, Volume)), None)
        return made


class Label(torch.Tensor):
    pass


network = nn.Sequential(
    nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(1024, 10),
).to(device)  # fmt: skip
optimizer = torch.optim.Adam(network.parameters())
for _ in range(3):
    images = torch.rand(16, 3, 96, 96).as_subclass(Image).to(device)
    labels = torch.randint(0, 10, (16,)).as_subclass(Label).to(device)
    assert isinstance(images.brightened(1.1), Image)
    scores = network(images.brightened(1.1))
    assert isinstance(scores.mean(), Image)
    loss = nn.functional.cross_entropy(scores.as_subclass(torch.Tensor), labels.as_subclass(torch.Tensor))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
volume = Volume(torch.randn(1, 3, 64, 64), spacing=(1.0, 0.5)).to(device)
assert volume.spacing == (1.0, 0.5)
with torch.no_grad():
    network.eval()
    torch.stack([network(volume), network(volume.flip(-1))]).mean(0)
