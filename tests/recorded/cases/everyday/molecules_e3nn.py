"""Energies and forces of small molecules by an E(3)-equivariant network of e3nn, which writes its own TorchScript."""

import torch
from e3nn import o3
from e3nn.math import soft_one_hot_linspace
from e3nn.nn import FullyConnectedNet, Gate
from torch import nn

R_MAX, ELEMENTS = 4.0, 4


class Convolution(nn.Module):
    def __init__(self, irreps_in, irreps_sh, irreps_out, neighbours):
        super().__init__()
        self.neighbours = neighbours
        self.linear = o3.Linear(irreps_in, irreps_in)
        middle, instructions = [], []
        for i, (mul, ir_in) in enumerate(o3.Irreps(irreps_in)):
            for j, (_, ir_sh) in enumerate(o3.Irreps(irreps_sh)):
                for ir_out in ir_in * ir_sh:
                    if ir_out in o3.Irreps(irreps_out):
                        instructions.append((i, j, len(middle), "uvu", True))
                        middle.append((mul, ir_out))
        middle = o3.Irreps(middle)
        middle, p, _ = middle.sort()
        instructions = [(i, j, p[k], mode, train) for i, j, k, mode, train in instructions]
        self.tp = o3.TensorProduct(
            irreps_in, irreps_sh, middle, instructions, shared_weights=False, internal_weights=False
        )
        self.radial = FullyConnectedNet([8, 64, self.tp.weight_numel], torch.nn.functional.silu)
        self.out = o3.Linear(middle.simplify(), irreps_out)
        self.skip = o3.FullyConnectedTensorProduct(irreps_in, f"{ELEMENTS}x0e", irreps_out)

    def forward(self, x, z, source, target, sh, radial):
        messages = self.tp(self.linear(x)[source], sh, self.radial(radial))
        summed = torch.zeros(len(x), messages.shape[1], device=x.device).index_add_(0, target, messages)
        return self.out(summed / self.neighbours**0.5) + self.skip(x, z)


class Network(nn.Module):
    def __init__(self, lmax=2, layers=3):
        super().__init__()
        self.irreps_sh = o3.Irreps.spherical_harmonics(lmax)
        hidden = o3.Irreps("32x0e + 16x1o + 8x2e")
        irreps = o3.Irreps(f"{ELEMENTS}x0e")
        self.convolutions, self.gates = nn.ModuleList(), nn.ModuleList()
        for _ in range(layers):
            scalars = o3.Irreps([(mul, ir) for mul, ir in hidden if ir.l == 0])
            gated = o3.Irreps([(mul, ir) for mul, ir in hidden if ir.l > 0])
            gates = o3.Irreps(f"{gated.num_irreps}x0e")
            gate = Gate(scalars, [torch.nn.functional.silu], gates, [torch.sigmoid], gated)
            self.convolutions.append(Convolution(irreps, self.irreps_sh, gate.irreps_in, 6.0))
            self.gates.append(gate)
            irreps = gate.irreps_out
        self.head = o3.Linear(irreps, "1x0e")

    def forward(self, z, pos, batch, source, target, graphs):
        edge = pos[target] - pos[source]
        sh = o3.spherical_harmonics(self.irreps_sh, edge, normalize=True, normalization="component")
        radial = soft_one_hot_linspace(edge.norm(dim=1), 0.0, R_MAX, 8, basis="smooth_finite", cutoff=True) * 8**0.5
        z = torch.nn.functional.one_hot(z, ELEMENTS).float()
        x = z
        for convolution, gate in zip(self.convolutions, self.gates):
            x = gate(convolution(x, z, source, target, sh, radial))
        return torch.zeros(graphs, 1, device=x.device).index_add_(0, batch, self.head(x))


def batches(count, atoms=12, graphs=16):
    """Complete graphs of each molecule, so that the number of edges is the same in all."""
    for _ in range(count):
        pos = torch.randn(graphs * atoms, 3) * 1.5
        z = torch.randint(0, ELEMENTS, (graphs * atoms,))
        batch = torch.arange(graphs).repeat_interleave(atoms)
        source, target = ((batch[:, None] == batch[None]) & ~torch.eye(len(z), dtype=torch.bool)).nonzero().T
        yield z, pos, batch, source, target, torch.randn(graphs, 1), torch.randn(graphs * atoms, 3)


def main():
    torch.manual_seed(0)
    device = "cuda"
    model = Network().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, amsgrad=True)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
    train, val = list(batches(4)), list(batches(2))
    for epoch in range(2):
        for batch in train:
            z, pos, index, source, target, energy, force = (t.to(device) for t in batch)
            pos.requires_grad_(True)
            predicted = model(z, pos, index, source, target, len(energy))
            forces = -torch.autograd.grad(predicted.sum(), pos, create_graph=True)[0]
            loss = (predicted - energy).pow(2).mean() + 10 * (forces - force).pow(2).mean()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        total = 0.0
        for batch in val:
            z, pos, index, source, target, energy, force = (t.to(device) for t in batch)
            with torch.no_grad():
                total += (model(z, pos, index, source, target, len(energy)) - energy).abs().mean().item()
        scheduler.step(total)
        print(epoch, loss.item(), total)


if __name__ == "__main__":
    main()
