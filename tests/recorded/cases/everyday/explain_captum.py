"""A network is trained, then explained (captum): integrated gradients, occlusion, Grad-CAM, parts left out."""

import torch
from captum.attr import FeatureAblation, IntegratedGradients, LayerGradCam, Occlusion, Saliency
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import mobilenet_v2

torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.rand(64, 3, 96, 96), torch.randint(0, 5, (64,))), batch_size=16, shuffle=True)
model = mobilenet_v2(weights=None, num_classes=5).cuda()
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-5)
for epoch in range(2):
    for images, labels in loader:
        loss = nn.functional.cross_entropy(model(images.cuda()), labels.cuda(), label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())

model.eval()
images, labels = next(iter(loader))
images, target = images[:4].cuda().requires_grad_(), labels[:4].cuda()
baseline = torch.zeros_like(images)
found = {}
found["saliency"] = Saliency(model).attribute(images, target=target)
found["integrated"], delta = IntegratedGradients(model).attribute(
    images, baseline, target=target, n_steps=32, internal_batch_size=16, return_convergence_delta=True
)
found["cam"] = LayerGradCam(model, model.features[-1]).attribute(images, target=target)
with torch.no_grad():
    found["occluded"] = Occlusion(model).attribute(
        images, sliding_window_shapes=(3, 24, 24), strides=(3, 24, 24), target=target, perturbations_per_eval=4
    )
    patches = torch.arange(36).view(6, 6).repeat_interleave(16, 0).repeat_interleave(16, 1).cuda()
    found["ablated"] = FeatureAblation(model).attribute(
        images, feature_mask=patches.expand(1, 3, 96, 96), target=target
    )
for name, value in found.items():
    print(name, tuple(value.shape), value.abs().mean().item())
print("convergence", delta.abs().max().item())
