"""PyTorch's partitioners beside each other, and beside ``remat`` at the same peaks.

    python benchmarks/partitioners.py [--saved | --captured] [MODEL ...]

A training step of each model of the zoo is traced to its joint graph (nothing is computed), and partitioned: as eager
mode would, by min-cut, and with ``activation_memory_budget`` from 0.8 to 0. A cell: the peak in MiB beyond parameters
and inputs, and in brackets what the partition computes again in percent of one step (FLOPs, or elements), what
``remat`` computes again within the same peak, and a lower bound of that. The last column: seconds of processor time of
the partitioner and of ``remat``, all cells together. ``--saved`` adds bytes and names of the largest saved values.

``--captured``: the joint graph itself, called with its inputs, is captured instead; printed are the requested bytes of
the capture, those of the plan, and the workspaces that no operator of the graph makes.
"""

from __future__ import annotations

import argparse
import copy
import time
import warnings
from typing import Any

import torch
from torch import fx, nn
from torch._functorch import config
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition

import graphmem
from graphmem.errors import GraphError
from graphmem.plan_memory import Graph, from_fx, join_partitions, joint_graph, remat
from graphmem.plan_memory.peaks import peak
from graphmem.sources.fx_graph.reading import read
from models_zoo.build import build
from models_zoo.manifest import entry

#: Ten models, and batches that make activations larger than weights.
MODELS = {
    "mlp": 65536, "resnet18": 16, "mobilenet-v2": 16, "convnext-tiny": 8, "mlp-mixer": 8, "deit-small": 16,
    "distilbert-base": 16, "gpt2": 8, "t5-small": 16, "electra-small": 16,
}  # fmt: skip
BUDGETS = (0.8, 0.6, 0.4, 0.2, 0.0)
#: Saved values that are named.
SHOWN = 6


class _Step(nn.Module):
    def __init__(self, model: nn.Module, loss: Any) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, inputs: Any) -> torch.Tensor:
        outputs = self.model(**inputs) if isinstance(inputs, dict) else self.model(*inputs)
        if self.loss is not None:
            return self.loss(outputs)
        return outputs.loss if hasattr(outputs, "loss") else outputs.sum()


def joint_of(name: str) -> fx.GraphModule:
    """The joint graph of a training step."""
    step = build(entry(name), batch=MODELS.get(name))
    inputs = step.inputs if isinstance(step.inputs, (dict, tuple)) else (step.inputs,)
    step.model.eval()  # no dropout: its masks are saved by all, and would hide the rest
    for module in step.model.modules():
        module.train(isinstance(module, nn.modules.batchnorm._BatchNorm))
    if getattr(step.model, "loss_type", "") is None:  # it would warn that the default is taken, which breaks the graph
        step.model.loss_type = "ForCausalLM"
    torch._dynamo.reset()
    return joint_graph(_Step(step.model, step.loss), inputs)


def own_bytes(graph: Graph) -> int:
    """Bytes beyond what the caller holds, at most."""
    return peak(graph, "live") - held_bytes(graph)


def held_bytes(graph: Graph) -> int:
    """Bytes of parameters and inputs."""
    return sum(buffer.bytes for buffer in graph.buffers if buffer.held)


def work(graph: Graph) -> float:
    """FLOPs, or elements, of every node once."""
    return sum(node.cost for node in graph.nodes)


def row(name: str, show_saved: bool) -> None:
    """Print the row of one model."""
    joint = joint_of(name)
    options = joint.meta["partition"]
    whole = from_fx(joint)
    ways: list[tuple[str, Any, float]] = [("as eager", default_partition, 1.0)]
    ways += [("min-cut", min_cut_rematerialization_partition, 1.0)]
    ways += [(f"budget {budget:g}", min_cut_rematerialization_partition, budget) for budget in BUDGETS]
    cells, saved, seconds = [], [], [0.0, 0.0]
    for way, partition, budget in ways:
        begin = time.process_time()
        with config.patch(activation_memory_budget=budget):
            joined = join_partitions(*partition(copy.deepcopy(joint), [], **options))
        seconds[0] += time.process_time() - begin
        graph = from_fx(joined)
        own, again = own_bytes(graph), work(graph) / work(whole) - 1
        begin = time.process_time()
        try:
            plan = remat(whole, own + held_bytes(graph))
            ours = f"{plan.extra_cost / work(whole):.2%}, {plan.lower_bound / work(whole):.2%}"
        except GraphError as error:
            ours = str(error)
        seconds[1] += time.process_time() - begin
        cells.append(f"{own / 2**20:,.0f} ({again:.2%}, {ours})")
        kept = sorted(saved_buffers(joined).items(), key=lambda one: -one[1])
        largest = ", ".join(f"{node} {size / 2**20:.0f}" for node, size in kept[:SHOWN])
        saved.append(f"    {way}: {len(kept)} values, {sum(size for _, size in kept) / 2**20:,.0f} MiB; {largest}")
    print(f"| {name}, {MODELS[name]} | {' | '.join(cells)} | {seconds[0]:.1f}, {seconds[1]:.1f} |", flush=True)
    if show_saved:
        print("\n".join(saved), flush=True)


def show_captured(name: str) -> None:
    """Print what a capture of the joint graph holds, beside the plan."""
    joint = joint_of(name)
    placeholders = [node for node in joint.graph.nodes if node.op == "placeholder"]
    planned = peak(from_fx(joint, held=[node.name for node in placeholders]), "live")
    plain = fx.Graph()
    plain.output(plain.graph_copy(joint.graph, {}))
    values = [node.meta["val"] for node in placeholders]
    inputs = tuple(torch.empty(value.shape, dtype=value.dtype) for value in values)
    step = graphmem.Inference()
    found = graphmem.analyze(fx.GraphModule(joint, plain), inputs, training=step, device="A100-80GB")
    rest = found.requested - planned - found.breakdown["WORKSPACE"]
    print(f"{name}: captured {found.requested}, planned {planned}, {rest} beside workspaces at {found.moment.operator}")


def saved_buffers(joined: fx.GraphModule) -> dict[str, int]:
    """Names and bytes of what is kept from the forward graph for the backward one, inputs left out."""
    found = read(joined)
    nodes = {node.name: node for node in found.source.nodes}
    kept = {buffer for name in joined.meta["saved"] for buffer in found.buffers[nodes[name]]}
    return {one.name: one.bytes for one in (found.graph.buffers[buffer] for buffer in kept) if not one.held}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--saved", action="store_true")
    parser.add_argument("--captured", action="store_true")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    if asked.captured:
        for name in asked.models:
            show_captured(name)
        return
    ways = " | ".join(["as eager", "min-cut", *(f"budget {budget:g}" for budget in BUDGETS)])
    print(f"| model, batch | {ways} | s |")
    print("|---" * (len(BUDGETS) + 4) + "|")
    for name in asked.models:
        row(name, asked.saved)


if __name__ == "__main__":
    main()
