"""Programs of PyTorch alone, as tutorials and repositories write them: data, seeds, schedules, evaluation, files.

Without recurrent networks: the stub has no sizes of cuDNN's for them.
"""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from tests.recorded.cases.libraries.registry import program

DEVICE = "cuda"


class _VAE(nn.Module):
    def __init__(self, latent: int = 64) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU())
        self.mean, self.log_variance = nn.Linear(512, latent), nn.Linear(512, latent)
        self.decoder = nn.Sequential(nn.Linear(latent, 512), nn.ReLU(), nn.Linear(512, 1024), nn.ReLU())
        self.out = nn.Linear(1024, 784)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.encoder(x.flatten(1))
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        return torch.sigmoid(self.out(self.decoder(z))), mean, log_variance


@program()
def plain_vae() -> Any:
    """Shuffled images whose last batch is smaller; samples at the end of an epoch."""
    torch.manual_seed(1)
    loader = DataLoader(TensorDataset(torch.rand(600, 1, 28, 28)), batch_size=256, shuffle=True)
    model = _VAE().to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _epoch in range(2):
        model.train()
        total = 0.0
        for (images,) in loader:
            images = images.to(DEVICE)
            optimizer.zero_grad()
            made, mean, log_variance = model(images)
            reconstruction = F.binary_cross_entropy(made, images.flatten(1), reduction="sum")
            divergence = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
            loss = reconstruction + divergence
            loss.backward()
            total += loss.item()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            sample = model.out(model.decoder(torch.randn(64, 64, device=DEVICE))).cpu()
    return model, optimizer, sample, total


class _ViT(nn.Module):
    def __init__(self, width: int = 192, depth: int = 4, classes: int = 100) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, 65, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 3, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.encoder(x)[:, 0])


@program()
def plain_vit_mixup_ema() -> Any:
    """Mixup, smoothed labels, warm-up and cosine, exponential average, fp16 with a scaler, top-1 of the average."""
    torch.manual_seed(0)
    model = _ViT().to(DEVICE)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99))
    decayed = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5 * (1 + math.cos(math.pi * n / 6)))
    scaler = torch.amp.GradScaler("cuda")
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    images, labels = torch.randn(160, 3, 64, 64), torch.randint(0, 100, (160,))
    loader = DataLoader(TensorDataset(images, labels), batch_size=64, shuffle=True, pin_memory=True, drop_last=True)
    mixing = torch.distributions.Beta(0.8, 0.8)
    for _epoch in range(2):
        model.train()
        for x, y in loader:
            x, y = x.to(DEVICE, non_blocking=True), y.to(DEVICE, non_blocking=True)
            share, order = mixing.sample().item(), torch.randperm(len(x), device=DEVICE)
            mixed = share * x + (1 - share) * x[order]
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", torch.float16):
                out = model(mixed)
                loss = share * criterion(out, y) + (1 - share) * criterion(out, y[order])
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            average.update_parameters(model)
        average.eval()
        correct = 0
        with torch.inference_mode(), torch.autocast("cuda", torch.float16):
            for x, y in loader:
                correct += (average(x.to(DEVICE)).argmax(1) == y.to(DEVICE)).sum().item()
    return model, average, optimizer, correct


def _double(inner: int, outer: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inner, outer, 3, padding=1, bias=False), nn.BatchNorm2d(outer), nn.ReLU(inplace=True),
        nn.Conv2d(outer, outer, 3, padding=1, bias=False), nn.BatchNorm2d(outer), nn.ReLU(inplace=True),
    )  # fmt: skip


class _UNet(nn.Module):
    def __init__(self, widths: tuple[int, ...] = (32, 64, 128), classes: int = 5) -> None:
        super().__init__()
        self.down = nn.ModuleList(_double(a, b) for a, b in zip((3, *widths), widths, strict=False))
        self.middle = _double(widths[-1], 2 * widths[-1])
        back = tuple(reversed(widths))
        self.grow = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in back)
        self.up = nn.ModuleList(_double(2 * w, w) for w in back)
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for block in self.down:
            x = block(x)
            kept.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for grow, block in zip(self.grow, self.up, strict=True):
            x = block(torch.cat([kept.pop(), grow(x)], 1))
        return self.head(x)


def _dice(logits: Tensor, target: Tensor) -> Tensor:
    shares = logits.softmax(1)
    wanted = F.one_hot(target, logits.shape[1]).permute(0, 3, 1, 2).float()
    both = (shares * wanted).sum((0, 2, 3))
    return 1 - (2 * both / (shares.sum((0, 2, 3)) + wanted.sum((0, 2, 3))).clamp(min=1e-6)).mean()


@program()
def plain_unet_dice() -> Any:
    """Segmentation under bf16 autocast with cross-entropy and Dice; intersections are counted in evaluation."""
    torch.manual_seed(0)
    model = _UNet().to(DEVICE)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-4, momentum=0.9, foreach=True)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=1)
    data = TensorDataset(torch.randn(12, 3, 96, 96), torch.randint(0, 5, (12, 96, 96)))
    loader = DataLoader(data, batch_size=4, shuffle=True)
    for _epoch in range(2):
        model.train()
        for images, masks in loader:
            images = images.to(DEVICE, memory_format=torch.channels_last)
            masks = masks.to(DEVICE)
            with torch.autocast("cuda", torch.bfloat16):
                logits = model(images)
                loss = F.cross_entropy(logits, masks) + _dice(logits.float(), masks)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        matrix = torch.zeros(5, 5, device=DEVICE, dtype=torch.int64)
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            for images, masks in loader:
                guess, truth = model(images.to(DEVICE)).argmax(1), masks.to(DEVICE)
                matrix += torch.bincount((truth * 5 + guess).flatten(), minlength=25).view(5, 5)
        plateau.step((matrix.diag().sum() / matrix.sum()).item())
    return model, optimizer, matrix


@program()
def plain_dcgan() -> Any:
    """Two optimizers, spectral norm, the generator's samples shown at the end, checkpoints of both."""
    torch.manual_seed(999)
    maker = nn.Sequential(
        nn.ConvTranspose2d(100, 256, 4, 1, 0, bias=False), nn.BatchNorm2d(256), nn.ReLU(True),
        nn.ConvTranspose2d(256, 128, 4, 2, 1, bias=False), nn.BatchNorm2d(128), nn.ReLU(True),
        nn.ConvTranspose2d(128, 64, 4, 2, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(True),
        nn.ConvTranspose2d(64, 3, 4, 2, 1, bias=False), nn.Tanh(),
    ).to(DEVICE)  # fmt: skip
    judge = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 64, 4, 2, 1)), nn.LeakyReLU(0.2, True),
        nn.utils.parametrizations.spectral_norm(nn.Conv2d(64, 128, 4, 2, 1)), nn.LeakyReLU(0.2, True),
        nn.Conv2d(128, 1, 8), nn.Flatten(),
    ).to(DEVICE)  # fmt: skip
    of_maker = torch.optim.Adam(maker.parameters(), 2e-4, (0.5, 0.999))
    of_judge = torch.optim.Adam(judge.parameters(), 2e-4, (0.5, 0.999))
    criterion, fixed = nn.BCEWithLogitsLoss(), torch.randn(64, 100, 1, 1, device=DEVICE)
    history = []
    for (real,) in DataLoader(TensorDataset(torch.randn(96, 3, 32, 32)), batch_size=32):
        real = real.to(DEVICE)
        judge.zero_grad()
        real_loss = criterion(judge(real), torch.ones(len(real), 1, device=DEVICE))
        real_loss.backward()
        fake = maker(torch.randn(len(real), 100, 1, 1, device=DEVICE))
        fake_loss = criterion(judge(fake.detach()), torch.zeros(len(real), 1, device=DEVICE))
        fake_loss.backward()
        of_judge.step()
        maker.zero_grad()
        loss = criterion(judge(fake), torch.ones(len(real), 1, device=DEVICE))
        loss.backward()
        of_maker.step()
        history.append((loss.item(), (real_loss + fake_loss).item()))
    with torch.no_grad():
        shown = maker(fixed).detach().cpu()
    buffer = io.BytesIO()
    torch.save({"maker": maker.state_dict(), "of_maker": of_maker.state_dict()}, buffer)
    return maker, judge, of_maker, of_judge, shown, history


@program()
def plain_moco() -> Any:
    """A queue of keys, an encoder that follows another, and temperatures."""
    torch.manual_seed(0)

    def encoder() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 64, 3, 2, 1), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 128, 3, 2, 1), nn.BatchNorm2d(128),
            nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 128),
        ).to(DEVICE)  # fmt: skip

    query, key = encoder(), encoder()
    key.load_state_dict(query.state_dict())
    for parameter in key.parameters():
        parameter.requires_grad = False
    queue, pointer = F.normalize(torch.randn(128, 4096, device=DEVICE), dim=0), 0
    optimizer = torch.optim.SGD(query.parameters(), 0.03, momentum=0.9, weight_decay=1e-4)
    for _step in range(4):
        first, second = torch.randn(2, 64, 3, 64, 64).to(DEVICE)
        q = F.normalize(query(first), dim=1)
        with torch.no_grad():
            for kept, new in zip(key.parameters(), query.parameters(), strict=True):
                kept.data = kept.data * 0.999 + new.data * 0.001
            order = torch.randperm(64, device=DEVICE)
            k = F.normalize(key(second[order]), dim=1)[torch.argsort(order)]
        positive = torch.einsum("nc,nc->n", q, k).unsqueeze(-1)
        negative = torch.einsum("nc,ck->nk", q, queue.clone().detach())
        logits = torch.cat([positive, negative], dim=1) / 0.07
        loss = F.cross_entropy(logits, torch.zeros(64, dtype=torch.long, device=DEVICE))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        queue[:, pointer : pointer + 64] = k.T
        pointer = (pointer + 64) % 4096
    return query, key, queue, optimizer


class _Block(nn.Module):
    def __init__(self, width: int = 256, heads: int = 8) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: Tensor, cache: list[Tensor] | None = None) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.first(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if cache is not None:
            if cache:
                k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
            cache[:] = [k, v]
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=length > 1)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.second(x))


class _GPT(nn.Module):
    def __init__(self, words: int = 3000, width: int = 256, depth: int = 4, checkpointed: bool = False) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(words, width), nn.Embedding(512, width)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.tokens.weight
        self.checkpointed = checkpointed

    def forward(self, ids: Tensor, caches: list[list[Tensor]] | None = None, start: int = 0) -> Tensor:
        places = torch.arange(start, start + ids.shape[1], device=ids.device)
        x = self.tokens(ids) + self.positions(places)
        for number, block in enumerate(self.blocks):
            if self.checkpointed and self.training:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x, caches[number] if caches is not None else None)
        return self.head(self.norm(x))


@program()
def plain_gpt_accumulated() -> Any:
    """Accumulated gradients, checkpointed blocks, bf16 autocast, fused AdamW, a checkpoint that is loaded again."""
    torch.manual_seed(1337)
    model = _GPT(checkpointed=True).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4, betas=(0.9, 0.95), fused=True)
    data = torch.randint(0, 3000, (20_000,))
    for _step in range(3):
        for _micro in range(4):
            places = torch.randint(len(data) - 257, (8,))
            x = torch.stack([data[i : i + 256] for i in places]).pin_memory().to(DEVICE, non_blocking=True)
            y = torch.stack([data[i + 1 : i + 257] for i in places]).pin_memory().to(DEVICE, non_blocking=True)
            with torch.autocast("cuda", torch.bfloat16):
                logits = model(x)
                loss = F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1)) / 4
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    buffer.seek(0)
    model.load_state_dict(torch.load(buffer, map_location=DEVICE)["model"])
    return model, optimizer


@program()
def plain_gpt_serving() -> Any:
    """Greedy decoding with a cache of keys and values in inference mode under autocast, two requests."""
    torch.manual_seed(0)
    model = _GPT().to(DEVICE).eval()
    answers = []
    with torch.inference_mode(), torch.autocast("cuda", torch.bfloat16):
        for length in (100, 37):
            ids = torch.randint(0, 3000, (4, length), device=DEVICE)
            caches: list[list[Tensor]] = [[] for _ in model.blocks]
            token, made = model(ids, caches)[:, -1:].argmax(-1), []
            for place in range(length, length + 24):
                made.append(token)
                token = model(token, caches, place)[:, -1:].argmax(-1)
            answers.append(torch.cat(made, 1).cpu())
    return model, answers


@program()
def plain_distillation() -> Any:
    """A frozen teacher, hidden states that are matched, temperatures."""
    torch.manual_seed(0)
    teacher, student = _GPT(depth=6).to(DEVICE).eval().requires_grad_(False), _GPT(depth=2).to(DEVICE)
    optimizer = torch.optim.AdamW(student.parameters(), 1e-4)
    hidden: dict[str, Tensor] = {}
    teacher.norm.register_forward_hook(lambda _m, _i, out: hidden.update(teacher=out))
    student.norm.register_forward_hook(lambda _m, _i, out: hidden.update(student=out))
    for _step in range(3):
        ids = torch.randint(0, 3000, (8, 128), device=DEVICE)
        with torch.no_grad():
            wanted = teacher(ids)
        logits = student(ids)
        soft = F.kl_div(F.log_softmax(logits / 2, -1), F.softmax(wanted / 2, -1), reduction="batchmean") * 4
        hard = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss = 0.5 * soft + 0.5 * hard + F.mse_loss(hidden["student"], hidden["teacher"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return teacher, student, optimizer, hidden


@program()
def plain_ppo() -> Any:
    """An actor and a critic on an environment of numpy's kind: rollouts, advantages, minibatches of a permutation."""
    torch.manual_seed(0)
    actor = nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 6)).to(DEVICE)
    critic = nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 1)).to(DEVICE)
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], 2.5e-4, eps=1e-5)
    steps, environments = 64, 8
    observations = torch.zeros(steps, environments, 16, device=DEVICE)
    actions = torch.zeros(steps, environments, device=DEVICE)
    chances, rewards, values = (torch.zeros(steps, environments, device=DEVICE) for _ in range(3))
    for _update in range(2):
        seen = torch.randn(environments, 16).to(DEVICE)
        for step in range(steps):
            observations[step] = seen
            with torch.no_grad():
                policy = torch.distributions.Categorical(logits=actor(seen), validate_args=False)
                action = policy.sample()
                values[step] = critic(seen).flatten()
            actions[step], chances[step] = action, policy.log_prob(action)
            seen, rewards[step] = torch.randn(environments, 16).to(DEVICE), torch.randn(environments).to(DEVICE)
        with torch.no_grad():
            advantages, last = torch.zeros_like(rewards), torch.zeros(environments, device=DEVICE)
            following = critic(seen).flatten()
            for step in reversed(range(steps)):
                delta = rewards[step] + 0.99 * following - values[step]
                advantages[step] = last = delta + 0.99 * 0.95 * last
                following = values[step]
        flat = observations.view(-1, 16), actions.view(-1), chances.view(-1), advantages.view(-1)
        returns = (advantages + values).view(-1)
        for order in torch.randperm(steps * environments, device=DEVICE).split(128):
            policy = torch.distributions.Categorical(logits=actor(flat[0][order]), validate_args=False)
            ratio = (policy.log_prob(flat[1][order]) - flat[2][order]).exp()
            gain = flat[3][order]
            gain = (gain - gain.mean()) / (gain.std() + 1e-8)
            policy_loss = torch.max(-gain * ratio, -gain * torch.clamp(ratio, 0.8, 1.2)).mean()
            value_loss = 0.5 * ((critic(flat[0][order]).flatten() - returns[order]) ** 2).mean()
            loss = policy_loss - 0.01 * policy.entropy().mean() + 0.5 * value_loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_([*actor.parameters(), *critic.parameters()], 0.5)
            optimizer.step()
    return actor, critic, optimizer, observations


@program()
def plain_graph_network() -> Any:
    """Messages along edges by ``index_add``, degrees by ``scatter_add``, masks of nodes, the best weights kept."""
    torch.manual_seed(0)
    nodes, edges = 3000, torch.randint(0, 3000, (2, 20_000))
    edges = torch.cat([edges, torch.arange(nodes).repeat(2, 1)], 1).to(DEVICE)
    features, labels = torch.randn(nodes, 128).to(DEVICE), torch.randint(0, 7, (nodes,)).to(DEVICE)
    training = (torch.arange(nodes) < 1400).to(DEVICE)
    layers = nn.ModuleList([nn.Linear(128, 64), nn.Linear(64, 7)]).to(DEVICE)
    optimizer = torch.optim.Adam(layers.parameters(), 0.01, weight_decay=5e-4)

    def forward() -> Tensor:
        x = features
        source, target = edges
        degree = torch.zeros(nodes, device=DEVICE).scatter_add_(0, target, torch.ones(len(target), device=DEVICE))
        weight = degree.pow(-0.5)[source] * degree.pow(-0.5)[target]
        for number, layer in enumerate(layers):
            x = layer(F.dropout(x, 0.5, layers.training))
            x = torch.zeros_like(x).index_add_(0, target, x[source] * weight[:, None])
            x = F.relu(x) if number == 0 else x
        return x

    best, best_state = -1.0, None
    for _epoch in range(3):
        layers.train()
        optimizer.zero_grad()
        F.cross_entropy(forward()[training], labels[training]).backward()
        optimizer.step()
        layers.eval()
        with torch.no_grad():
            guess = forward()[~training].argmax(-1)
            accuracy = (guess == labels[~training]).float().mean()
        if best_state is None or accuracy.item() > best:
            best, best_state = accuracy.item(), copy.deepcopy(layers.state_dict())
    return layers, optimizer, best_state


@program()
def plain_detection_head() -> Any:
    """Anchors matched to boxes by their overlap, losses of the matched ones alone, a greedy suppression afterwards."""
    torch.manual_seed(0)
    backbone = nn.Sequential(
        nn.Conv2d(3, 64, 7, 4, 3), nn.GroupNorm(8, 64), nn.SiLU(), nn.Conv2d(64, 128, 3, 2, 1), nn.SiLU()
    ).to(DEVICE)
    classify, regress = nn.Conv2d(128, 9 * 4, 3, padding=1).to(DEVICE), nn.Conv2d(128, 9 * 4, 3, padding=1).to(DEVICE)
    parameters = [*backbone.parameters(), *classify.parameters(), *regress.parameters()]
    optimizer = torch.optim.SGD(parameters, 0.01, momentum=0.9, nesterov=True)
    corners = torch.rand(16 * 16 * 9, 2) * 100
    anchors = torch.cat([corners, corners + 20 + torch.rand(16 * 16 * 9, 2) * 20], 1).to(DEVICE)

    def overlap(a: Tensor, b: Tensor) -> Tensor:
        low, high = torch.max(a[:, None, :2], b[:, :2]), torch.min(a[:, None, 2:], b[:, 2:])
        both = (high - low).clamp(min=0).prod(2)
        areas = [(boxes[:, 2:] - boxes[:, :2]).prod(1) for boxes in (a, b)]
        return both / (areas[0][:, None] + areas[1] - both)

    for _step in range(3):
        images = torch.randn(2, 3, 128, 128).to(DEVICE)
        boxes = torch.tensor([[10.0, 10, 60, 60], [40, 50, 90, 110], [70, 20, 120, 60]]).to(DEVICE)
        classes = torch.tensor([0, 2, 3]).to(DEVICE)
        features = backbone(images)
        scores = classify(features).permute(0, 2, 3, 1).reshape(2, -1, 4)
        moves = regress(features).permute(0, 2, 3, 1).reshape(2, -1, 4)
        best, which = overlap(anchors, boxes).max(1)
        wanted = torch.zeros_like(scores)
        matched = torch.arange(len(anchors), device=DEVICE) % 50 == 0
        wanted[:, matched, classes[which[matched]]] = 1.0
        focal = F.binary_cross_entropy_with_logits(scores, wanted, reduction="none")
        focal = focal * (1 - torch.exp(-focal)) ** 2
        box_loss = F.smooth_l1_loss(moves[:, matched], (boxes[which[matched]] - anchors[matched]).expand(2, -1, -1))
        loss = focal.sum() / matched.sum() + box_loss + 0 * best.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        top, order = scores[0].sigmoid().max(1).values.topk(100)
        kept = anchors[order]
        inside = overlap(kept, kept).triu(1)
    return backbone, optimizer, top, inside
