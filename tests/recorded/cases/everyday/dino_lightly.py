"""Pictures without labels by Lightly: DINO with a student and a teacher, crops of two sizes; a nearest neighbour test."""

import copy

import torch
from lightly.loss import DINOLoss
from lightly.models.modules import DINOProjectionHead
from lightly.models.utils import deactivate_requires_grad, update_momentum
from lightly.transforms.dino_transform import DINOTransform
from lightly.utils.scheduler import cosine_schedule
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision.models import resnet18

torch.manual_seed(0)


class Pictures(Dataset):
    def __init__(self, n):
        self.pictures = [Image.fromarray(p) for p in torch.randint(0, 255, (n, 96, 96, 3), dtype=torch.uint8).numpy()]
        self.transform = DINOTransform(global_crop_size=96, local_crop_size=48, n_local_views=4)

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, i):
        return self.transform(self.pictures[i])


class DINO(nn.Module):
    def __init__(self, backbone, width):
        super().__init__()
        self.student, self.student_head = backbone, DINOProjectionHead(width, 512, 64, 2048, freeze_last_layer=1)
        self.teacher, self.teacher_head = copy.deepcopy(backbone), DINOProjectionHead(width, 512, 64, 2048)
        deactivate_requires_grad(self.teacher), deactivate_requires_grad(self.teacher_head)

    def forward(self, x):
        return self.student_head(self.student(x).flatten(start_dim=1))

    def forward_teacher(self, x):
        return self.teacher_head(self.teacher(x).flatten(start_dim=1))


loader = DataLoader(Pictures(64), batch_size=16, shuffle=True, drop_last=True)
model = DINO(nn.Sequential(*list(resnet18(weights=None).children())[:-1]), 512).cuda()
criterion = DINOLoss(output_dim=2048, warmup_teacher_temp_epochs=5).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for epoch in range(3):
    momentum, total = cosine_schedule(epoch, 3, 0.996, 1), 0
    for views in loader:
        update_momentum(model.student, model.teacher, m=momentum)
        update_momentum(model.student_head, model.teacher_head, m=momentum)
        views = [view.cuda() for view in views]
        taught = [model.forward_teacher(view) for view in views[:2]]
        learnt = [model.forward(view) for view in views]
        loss = criterion(taught, learnt, epoch=epoch)
        total += loss.detach()
        loss.backward()
        model.student_head.cancel_last_layer_gradients(current_epoch=epoch)
        optimizer.step()
        optimizer.zero_grad()
    print(f"epoch {epoch} loss {total / len(loader):.5f}")
    torch.save(model.state_dict(), "dino.pt")
model.eval()
with torch.no_grad():
    features = nn.functional.normalize(model.teacher(torch.rand(80, 3, 96, 96).cuda()).flatten(1))
    nearest = (features @ features.T).topk(6, dim=1).indices[:, 1:]
print(nearest.float().mean().item())
