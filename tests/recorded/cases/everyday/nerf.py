"""NeRF, small: rays in chunks, importance sampling by searchsorted, coarse and fine networks."""

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.set_default_dtype(torch.float32)
np.random.seed(0)
torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
H, W, focal, N_rand, chunk, netchunk, N_samples, N_importance = 40, 40, 45.0, 512, 1024, 1024 * 16, 32, 32
embed = lambda x, n: torch.cat([x] + [f(x * 2.0**k) for k in range(n) for f in (torch.sin, torch.cos)], -1)


class NeRF(nn.Module):
    def __init__(self, D=6, Wd=128, ic=63, iv=27, skips=(3,)):
        super().__init__()
        self.skips = skips
        self.pts = nn.ModuleList(
            [nn.Linear(ic, Wd)] + [nn.Linear(Wd if i not in skips else Wd + ic, Wd) for i in range(D - 1)]
        )
        self.views, self.feature, self.alpha, self.rgb = (
            nn.Linear(iv + Wd, Wd // 2),
            nn.Linear(Wd, Wd),
            nn.Linear(Wd, 1),
            nn.Linear(Wd // 2, 3),
        )

    def forward(self, x):
        p, v = torch.split(x, [63, 27], dim=-1)
        h = p
        for i, l in enumerate(self.pts):
            h = F.relu(l(h))
            if i in self.skips:
                h = torch.cat([p, h], -1)
        a = self.alpha(h)
        h = F.relu(self.views(torch.cat([self.feature(h), v], -1)))
        return torch.cat([self.rgb(h), a], -1)


def get_rays(c2w):
    i, j = torch.meshgrid(torch.linspace(0, W - 1, W), torch.linspace(0, H - 1, H), indexing="ij")
    i, j = i.t().to(device), j.t().to(device)
    dirs = torch.stack([(i - W * 0.5) / focal, -(j - H * 0.5) / focal, -torch.ones_like(i)], -1)
    return torch.sum(dirs[..., None, :] * c2w[:3, :3], -1), c2w[:3, -1].expand(H, W, 3)


def sample_pdf(bins, weights, n):
    weights = weights + 1e-5
    pdf = weights / torch.sum(weights, -1, keepdim=True)
    cdf = torch.cumsum(pdf, -1)
    cdf = torch.cat([torch.zeros_like(cdf[..., :1]), cdf], -1)
    u = torch.rand(list(cdf.shape[:-1]) + [n], device=device).contiguous()
    inds = torch.searchsorted(cdf, u, right=True)
    below, above = (
        torch.max(torch.zeros_like(inds - 1), inds - 1),
        torch.min((cdf.shape[-1] - 1) * torch.ones_like(inds), inds),
    )
    g = torch.stack([below, above], -1)
    shape = [g.shape[0], g.shape[1], cdf.shape[-1]]
    cg, bg = torch.gather(cdf.unsqueeze(1).expand(shape), 2, g), torch.gather(bins.unsqueeze(1).expand(shape), 2, g)
    denom = cg[..., 1] - cg[..., 0]
    denom = torch.where(denom < 1e-5, torch.ones_like(denom), denom)
    return bg[..., 0] + (u - cg[..., 0]) / denom * (bg[..., 1] - bg[..., 0])


def raw2outputs(raw, z, d):
    dists = torch.cat(
        [z[..., 1:] - z[..., :-1], torch.tensor([1e10], device=device).expand(z[..., :1].shape)], -1
    ) * torch.norm(d[..., None, :], dim=-1)
    rgb = torch.sigmoid(raw[..., :3])
    alpha = 1.0 - torch.exp(-F.relu(raw[..., 3]) * dists)
    weights = (
        alpha
        * torch.cumprod(torch.cat([torch.ones((alpha.shape[0], 1), device=device), 1.0 - alpha + 1e-10], -1), -1)[
            :, :-1
        ]
    )
    return torch.sum(weights[..., None] * rgb, -2), weights


def query(net, pts, dirs):
    flat = embed(pts.reshape(-1, 3), 10)
    d = embed(dirs[:, None].expand(pts.shape).reshape(-1, 3), 4)
    x = torch.cat([flat, d], -1)
    out = torch.cat([net(x[i : i + netchunk]) for i in range(0, x.shape[0], netchunk)], 0)
    return out.reshape(list(pts.shape[:-1]) + [4])


def render_rays(o, d):
    v = d / torch.norm(d, dim=-1, keepdim=True)
    z = 2.0 * (1 - torch.linspace(0.0, 1.0, N_samples, device=device)) + 6.0 * torch.linspace(
        0.0, 1.0, N_samples, device=device
    )
    z = z.expand([len(o), N_samples])
    mids = 0.5 * (z[..., 1:] + z[..., :-1])
    upper, lower = torch.cat([mids, z[..., -1:]], -1), torch.cat([z[..., :1], mids], -1)
    z = lower + (upper - lower) * torch.rand(z.shape, device=device)
    rgb0, w = raw2outputs(query(coarse, o[..., None, :] + d[..., None, :] * z[..., :, None], v), z, d)
    zs = sample_pdf(0.5 * (z[..., 1:] + z[..., :-1]), w[..., 1:-1], N_importance).detach()
    z, _ = torch.sort(torch.cat([z, zs], -1), -1)
    rgb, _ = raw2outputs(query(fine, o[..., None, :] + d[..., None, :] * z[..., :, None], v), z, d)
    return rgb, rgb0


coarse, fine = NeRF().to(device), NeRF().to(device)
opt = torch.optim.Adam(list(coarse.parameters()) + list(fine.parameters()), lr=5e-4, betas=(0.9, 0.999))
images, poses = np.random.rand(4, H, W, 3).astype(np.float32), np.tile(np.eye(4, dtype=np.float32), (4, 1, 1))
for i in range(3):
    k = np.random.choice(4)
    target, pose = torch.Tensor(images[k]).to(device), torch.Tensor(poses[k, :3, :4]).to(device)
    rays_d, rays_o = get_rays(pose)
    coords = torch.stack(torch.meshgrid(torch.linspace(0, H - 1, H), torch.linspace(0, W - 1, W), indexing="ij"), -1)
    coords = torch.reshape(coords, [-1, 2])
    sel = coords[np.random.choice(coords.shape[0], size=[N_rand], replace=False)].long()
    ro, rd, ts = rays_o[sel[:, 0], sel[:, 1]], rays_d[sel[:, 0], sel[:, 1]], target[sel[:, 0], sel[:, 1]]
    rgb, rgb0 = render_rays(ro, rd)
    opt.zero_grad()
    loss = torch.mean((rgb - ts) ** 2) + torch.mean((rgb0 - ts) ** 2)
    psnr = -10.0 * torch.log(loss) / torch.log(torch.Tensor([10.0]).to(device))
    loss.backward()
    opt.step()
    for g in opt.param_groups:
        g["lr"] = 5e-4 * (0.1 ** (i / 250000))
    print(f"[TRAIN] Iter: {i} Loss: {loss.item()} PSNR: {psnr.item()}")
with torch.no_grad():
    rays_d, rays_o = get_rays(torch.Tensor(poses[0, :3, :4]).to(device))
    o, d = rays_o.reshape(-1, 3), rays_d.reshape(-1, 3)
    rgb = torch.cat([render_rays(o[k : k + chunk], d[k : k + chunk])[0] for k in range(0, len(o), chunk)], 0)
    print((255 * np.clip(rgb.cpu().numpy(), 0, 1)).astype(np.uint8).shape)
