"""A vision transformer taught by a network of convolutions (vit_pytorch), with an optimizer that needs no schedule."""

import schedulefree
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import resnet50
from vit_pytorch.distill import DistillableViT, DistillWrapper

torch.manual_seed(0)
train = DataLoader(
    TensorDataset(torch.rand(96, 3, 192, 192), torch.randint(0, 100, (96,))), batch_size=16, shuffle=True
)
test = DataLoader(TensorDataset(torch.rand(40, 3, 192, 192), torch.randint(0, 100, (40,))), batch_size=32)
teacher = resnet50(weights=None, num_classes=100).cuda().eval().requires_grad_(False)
student = DistillableViT(
    image_size=192,
    patch_size=16,
    num_classes=100,
    dim=384,
    depth=6,
    heads=6,
    mlp_dim=1536,
    dropout=0.1,
    emb_dropout=0.1,
).cuda()
distiller = DistillWrapper(student=student, teacher=teacher, temperature=3, alpha=0.5, hard=False).cuda()
optimizer = schedulefree.AdamWScheduleFree(
    [p for p in distiller.parameters() if p.requires_grad], lr=2.5e-3, warmup_steps=4
)

for epoch in range(2):
    student.train(), optimizer.train()
    for images, labels in train:
        images, labels = images.cuda(non_blocking=True), labels.cuda(non_blocking=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = distiller(images, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    student.eval(), optimizer.eval()
    total = right = 0
    with torch.no_grad():
        for images, labels in test:
            logits = student(images.cuda())
            total += F.cross_entropy(logits, labels.cuda(), reduction="sum").item()
            right += (logits.argmax(1).cpu() == labels).sum().item()
    print(f"epoch {epoch} loss {loss.item():.3f} test {total / 40:.3f} accuracy {right / 40:.2%}")
    torch.save({"student": student.state_dict(), "optimizer": optimizer.state_dict()}, f"epoch{epoch}.pt")
