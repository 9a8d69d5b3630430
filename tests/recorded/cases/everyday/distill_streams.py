"""Distillation with multi-task heads weighted by uncertainty; batches are copied on a stream of their own; checkpointed
blocks, profiler, progress bar, the old spelling of mixed precision."""

import collections
import contextlib
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.cuda.amp import GradScaler, autocast
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from torch.utils.data import DataLoader, IterableDataset
from tqdm import tqdm


class Stream(IterableDataset):
    def __init__(self, n, size=96):
        self.n, self.size = n, size

    def __iter__(self):
        g = torch.Generator().manual_seed(9)
        for _ in range(self.n):
            x = torch.randn(3, self.size, self.size, generator=g)
            yield x, torch.randint(0, 30, (1,), generator=g).squeeze(0), x.mean(0, keepdim=True)


class Prefetcher:
    def __init__(self, loader, device):
        self.loader, self.stream, self.device = iter(loader), torch.cuda.Stream(device), device
        self.preload()

    def preload(self):
        try:
            self.next = next(self.loader)
        except StopIteration:
            self.next = None
            return
        with torch.cuda.stream(self.stream):
            self.next = [t.to(self.device, non_blocking=True) for t in self.next]
            self.next[0] = self.next[0].sub_(0.1).div_(1.1)

    def __iter__(self):
        while True:
            torch.cuda.current_stream().wait_stream(self.stream)
            batch = self.next
            if batch is None:
                return
            for tensor in batch:
                tensor.record_stream(torch.cuda.current_stream())
            self.preload()
            yield batch


class Block(nn.Module):
    def __init__(self, dim, heads, recompute):
        super().__init__()
        self.n1, self.n2, self.recompute = nn.LayerNorm(dim), nn.LayerNorm(dim), recompute
        self.attn = nn.MultiheadAttention(dim, heads, dropout=0.1, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * dim, dim))

    def _forward(self, x):
        y = self.n1(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.n2(x))

    def forward(self, x):
        if self.recompute and self.training:
            return checkpoint(self._forward, x, use_reentrant=False)
        return self._forward(x)


class Model(nn.Module):
    def __init__(self, dim, depth, heads, recompute=False, segments=0):
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 8, 8)
        self.pos = nn.Parameter(torch.zeros(1, 144, dim))
        self.blocks, self.segments = nn.Sequential(*(Block(dim, heads, recompute) for _ in range(depth))), segments
        self.cls, self.dense = nn.Linear(dim, 30), nn.Linear(dim, 64)
        nn.init.trunc_normal_(self.pos, std=0.02)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2) + self.pos
        if self.segments and self.training:
            x = checkpoint_sequential(self.blocks, self.segments, x, use_reentrant=False)
        else:
            x = self.blocks(x)
        return self.cls(x.mean(1)), F.pixel_shuffle(self.dense(x).transpose(1, 2).unflatten(2, (12, 12)), 8), x


class Uncertainty(nn.Module):
    def __init__(self, tasks):
        super().__init__()
        self.log_vars = nn.ParameterDict({name: nn.Parameter(torch.zeros(())) for name in tasks})

    def forward(self, losses):
        return sum(torch.exp(-self.log_vars[k]) * v + self.log_vars[k] for k, v in losses.items())


torch.manual_seed(31)
device = torch.device("cuda:0")
teacher = Model(256, 6, 8).to(device).eval().requires_grad_(False)
student = Model(128, 4, 4, recompute=True).to(device)
assistant = Model(128, 4, 4, segments=2).to(device)
project, weigh = nn.Linear(128, 256).to(device), Uncertainty(("ce", "kd", "dense", "hint")).to(device)
features = {}
handle = teacher.blocks[3].register_forward_hook(lambda m, i, o: features.__setitem__("hint", o.detach()))
scaler = GradScaler(init_scale=2.0**10)
start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
meters = collections.defaultdict(list)
for name, pupil in (("student", student), ("assistant", assistant)):
    params = [*pupil.parameters(), *project.parameters(), *weigh.parameters()]
    opt = torch.optim.NAdam(params, lr=1e-3, decoupled_weight_decay=True)
    swa = torch.optim.swa_utils.AveragedModel(pupil)
    loader = DataLoader(Stream(44), batch_size=16, num_workers=0, pin_memory=True)
    watched = profile(activities=[ProfilerActivity.CPU], schedule=schedule(wait=1, warmup=1, active=1, repeat=1))
    with watched if name == "student" else contextlib.nullcontext() as prof, tqdm(total=3, desc=name) as bar:
        for i, (x, y, target) in enumerate(Prefetcher(loader, device)):
            start.record()
            t0 = time.perf_counter()
            with torch.no_grad(), autocast():
                t_cls, t_dense, _ = teacher(x)
            with autocast(dtype=torch.float16), record_function("pupil"):
                s_cls, s_dense, s_feat = pupil(x)
                losses = {
                    "ce": F.cross_entropy(s_cls, y),
                    "kd": F.kl_div(
                        F.log_softmax(s_cls / 4, 1), F.softmax(t_cls / 4, 1), reduction="batchmean"
                    ) * 16,
                    "dense": F.l1_loss(s_dense, target) + F.mse_loss(s_dense, t_dense),
                    "hint": 1 - F.cosine_similarity(project(s_feat), features["hint"], dim=-1).mean(),
                }  # fmt: skip
                loss = weigh(losses)
            opt.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            norm = nn.utils.clip_grad_norm_(params, 1.0, error_if_nonfinite=False)
            scaler.step(opt)
            scaler.update()
            swa.update_parameters(pupil)
            stop.record()
            torch.cuda.synchronize()
            for k, v in losses.items():
                meters[k].append(v.detach())
            bar.set_postfix(loss=f"{loss.item():.3f}", norm=f"{norm.item():.2f}", ms=start.elapsed_time(stop) or t0)
            bar.update()
            if prof is not None:
                prof.step()
    torch.optim.swa_utils.update_bn(((x.to(device),) for x, _, _ in DataLoader(Stream(8), 4)), swa)
handle.remove()
print({k: torch.stack(v).mean().item() for k, v in meters.items()})
