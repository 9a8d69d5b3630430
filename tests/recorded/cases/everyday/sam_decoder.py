"""Segment Anything's decoder tuned on masks and boxes of one's own (segment_anything); its encoder is frozen and used once."""

import torch
import torch.nn.functional as F
from segment_anything import SamPredictor, sam_model_registry
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
sam = sam_model_registry["vit_b"](checkpoint=None).cuda()
for name, parameter in sam.named_parameters():
    parameter.requires_grad_(name.startswith("mask_decoder"))
pictures = torch.randint(0, 255, (6, 3, 1024, 768)).float()
corners = torch.rand(6, 2) * 400
boxes = torch.cat([corners, corners + 50 + torch.rand(6, 2) * 250], 1)
masks = (torch.rand(6, 1, 256, 256) > 0.5).float()

embeddings = []
sam.eval()
with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
    for picture in pictures.split(2):
        embeddings.append(sam.image_encoder(torch.stack([sam.preprocess(p) for p in picture.cuda()])).float().cpu())
loader = DataLoader(TensorDataset(torch.cat(embeddings), boxes, masks), batch_size=1, shuffle=True)


def dice(logits, target):
    p = logits.sigmoid().flatten(1)
    return (1 - (2 * (p * target.flatten(1)).sum(1) + 1) / (p.sum(1) + target.flatten(1).sum(1) + 1)).mean()


optimizer = torch.optim.AdamW([p for p in sam.parameters() if p.requires_grad], lr=1e-4, weight_decay=0.01)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1.0, (i + 1) / 4))
for epoch in range(2):
    sam.train()
    for embedding, box, mask in loader:
        with torch.no_grad():
            sparse, dense = sam.prompt_encoder(points=None, boxes=box[:, None].cuda(), masks=None)
        low, iou = sam.mask_decoder(
            image_embeddings=embedding.cuda(),
            image_pe=sam.prompt_encoder.get_dense_pe(),
            sparse_prompt_embeddings=sparse,
            dense_prompt_embeddings=dense,
            multimask_output=False,
        )
        mask = mask.cuda()
        loss = 20 * F.binary_cross_entropy_with_logits(low, mask) + dice(low, mask) + 0.01 * iou.pow(2).mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    print(f"epoch {epoch} loss {loss.item():.4f}")
    torch.save(sam.mask_decoder.state_dict(), "decoder.pt")
sam.eval()
predictor = SamPredictor(sam)
predictor.set_image(pictures[0].byte().permute(1, 2, 0).numpy())
found, scores, _ = predictor.predict(box=boxes[0].numpy(), multimask_output=True)
print(found.shape, scores)
