"""Steps of JAX programs on several cards, as their authors write them: meshes, shardings and ``shard_map``. Each
function gives a function and its arguments, as shapes with shardings.
"""

from __future__ import annotations

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

F32, BF16, I32 = jnp.float32, jnp.bfloat16, jnp.int32


def mesh(**axes):
    return Mesh(np.array(jax.devices()).reshape(tuple(axes.values())), tuple(axes))


def S(where, spec, *shape, t=F32):
    return jax.ShapeDtypeStruct(shape, t, sharding=NamedSharding(where, spec))


def spread(where, axis, tree):
    """Shapes of a tree, each cut along its first dimension that divides by the cards of an axis, as FSDP does."""
    size = where.shape[axis]

    def cut(leaf):
        spec = [None] * leaf.ndim
        for place, length in enumerate(leaf.shape):
            if length % size == 0 and length >= size:
                spec[place] = axis
                break
        return S(where, P(*spec), *leaf.shape, t=leaf.dtype)

    return jax.tree.map(cut, tree)


def whole(where, tree):
    """Shapes of a tree that every card has whole."""
    return jax.tree.map(lambda leaf: S(where, P(), *leaf.shape, t=leaf.dtype), tree)


class Block(nn.Module):
    width: int
    heads: int

    @nn.compact
    def __call__(self, x):
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(self.heads)(h, h)
        h = nn.Dense(4 * self.width)(nn.LayerNorm()(x))
        return x + nn.Dense(self.width)(nn.gelu(h))


class Encoder(nn.Module):
    width: int = 512
    layers: int = 4
    words: int = 8192

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(self.words, self.width)(tokens)
        for _ in range(self.layers):
            x = Block(self.width, 8)(x)
        return nn.Dense(self.words)(nn.LayerNorm()(x))


def trained(model, optimizer):
    def loss(params, tokens):
        logits = model.apply(params, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def step(params, state, tokens):
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def shapes_of(model, optimizer, batch, length):
    tokens = jax.ShapeDtypeStruct((batch, length - 1), I32)
    params = jax.eval_shape(model.init, jax.eval_shape(lambda: jax.random.PRNGKey(0)), tokens)
    return params, jax.eval_shape(optimizer.init, params)


def data_parallel():
    where, model, optimizer = mesh(data=2), Encoder(), optax.adamw(1e-4)
    params, state = shapes_of(model, optimizer, 16, 129)
    arguments = whole(where, params), whole(where, state), S(where, P("data"), 16, 129, t=I32)
    return jax.jit(trained(model, optimizer), donate_argnums=(0, 1)), arguments


def fully_sharded():
    where, model, optimizer = mesh(data=4), Encoder(), optax.adamw(1e-4)
    params, state = shapes_of(model, optimizer, 16, 129)
    arguments = spread(where, "data", params), spread(where, "data", state), S(where, P("data"), 16, 129, t=I32)
    kept = jax.tree.map(lambda leaf: leaf.sharding, arguments[:2])
    step = jax.jit(trained(model, optimizer), donate_argnums=(0, 1), out_shardings=(*kept, None))
    return step, arguments


def sharded_optimizer():
    where, model, optimizer = mesh(data=2), Encoder(width=384), optax.adam(1e-4)
    params, state = shapes_of(model, optimizer, 8, 257)
    arguments = whole(where, params), spread(where, "data", state), S(where, P("data"), 8, 257, t=I32)
    kept = jax.tree.map(lambda leaf: leaf.sharding, arguments[:2])
    return jax.jit(trained(model, optimizer), out_shardings=(*kept, None)), arguments


def tensor_parallel():
    where = mesh(model=2)

    def loss(params, x, y):
        for up, down in params:
            x = x + jax.nn.relu(x @ up) @ down
        return jnp.square(x - y).mean()

    @jax.jit
    def step(params, x, y):
        grads = jax.grad(loss)(params, x, y)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)

    layers = [(S(where, P(None, "model"), 1024, 4096), S(where, P("model", None), 4096, 1024)) for _ in range(4)]
    return step, (layers, S(where, P(), 1024, 1024), S(where, P(), 1024, 1024))


def two_axes():
    where = mesh(data=2, model=2)
    inside = partial(lax.with_sharding_constraint)

    def attention(x, wq, wk, wv, wo):
        q, k, v = (
            inside(jnp.einsum("bld,dhk->blhk", x, w), NamedSharding(where, P("data", None, "model", None)))
            for w in (wq, wk, wv)
        )
        scores = jax.nn.softmax(jnp.einsum("blhk,bmhk->bhlm", q, k) / 8.0)
        return jnp.einsum("blhk,hkd->bld", jnp.einsum("bhlm,bmhk->blhk", scores, v), wo)

    def loss(layers, x):
        for layer in layers:
            x = x + attention(x, *layer["attention"])
            x = x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]
            x = inside(x, NamedSharding(where, P("data", None, None)))
        return jnp.square(x.astype(F32)).mean()

    @partial(jax.jit, donate_argnums=0)
    def step(layers, x):
        value, grads = jax.value_and_grad(loss)(layers, x)
        return jax.tree.map(lambda w, g: w - (0.1 * g).astype(w.dtype), layers, grads), value

    heads = S(where, P(None, "model", None), 1024, 16, 64, t=BF16)
    layer = {
        "attention": (heads, heads, heads, S(where, P("model", None, None), 16, 64, 1024, t=BF16)),
        "up": S(where, P(None, "model"), 1024, 4096, t=BF16),
        "down": S(where, P("model", None), 4096, 1024, t=BF16),
    }
    return step, ([layer] * 3, S(where, P("data"), 8, 512, 1024, t=BF16))


def mapped_sum():
    where = mesh(data=2)

    def loss(w, x):
        return jnp.square(jnp.tanh(x @ w[0]) @ w[1]).mean()

    @jax.jit
    @partial(jax.shard_map, mesh=where, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
    def step(w, x):
        grads = jax.grad(loss)(w, x)
        return jax.tree.map(lambda w, g: w - 0.1 * lax.pmean(g, "data"), w, grads)

    weights = S(where, P(), 2048, 4096), S(where, P(), 4096, 2048)
    return step, (weights, S(where, P("data"), 4096, 2048))


def pipelined():
    where, micro = mesh(stage=2), 8

    def forward(w, batches):
        stage, last = lax.axis_index("stage"), lax.axis_size("stage") - 1

        def tick(carried, number):
            x = jnp.where(stage == 0, batches[jnp.minimum(number, micro - 1)], carried)
            y = jax.nn.gelu(x @ w["up"][0]) @ w["down"][0]
            return lax.ppermute(y, "stage", [(0, 1), (1, 0)]), y

        _, outputs = lax.scan(tick, jnp.zeros_like(batches[0]), jnp.arange(micro + last))
        return jnp.square(outputs[last:]).mean()

    @jax.jit
    @partial(jax.shard_map, mesh=where, in_specs=(P("stage"), P()), out_specs=P("stage"), check_vma=False)
    def step(w, batches):
        return jax.tree.map(lambda w, g: w - 0.1 * g, w, jax.grad(forward)(w, batches))

    stages = {name: S(where, P("stage"), 2, 1024, 1024) for name in ("up", "down")}
    return step, (stages, S(where, P(), micro, 256, 1024))


def experts():
    where, cards, width = mesh(expert=4), 4, 512

    def layer(params, x):
        scores = jax.nn.softmax(x @ params["router"])
        chosen = jax.nn.one_hot(scores.argmax(-1), cards, dtype=x.dtype)
        sent = lax.all_to_all(jnp.einsum("td,te->etd", x, chosen), "expert", 0, 0)
        done = jax.nn.relu(sent @ params["up"][0]) @ params["down"][0]
        back = lax.all_to_all(done, "expert", 0, 0)
        return jnp.einsum("etd,te->td", back, scores)

    def loss(params, x):
        return lax.pmean(jnp.square(layer(params, x)).mean(), "expert")

    specs = {"router": P(), "up": P("expert"), "down": P("expert")}

    @jax.jit
    @partial(jax.shard_map, mesh=where, in_specs=(specs, P("expert")), out_specs=specs, check_vma=False)
    def step(params, x):
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params, x))

    params = {
        "router": S(where, P(), width, cards),
        "up": S(where, P("expert"), cards, width, 2048),
        "down": S(where, P("expert"), cards, 2048, width),
    }
    return step, (params, S(where, P("expert"), 4096, width))


def ring_attention():
    where, cards = mesh(ring=4), 4

    @jax.jit
    @partial(jax.shard_map, mesh=where, in_specs=P(None, "ring"), out_specs=P(None, "ring"), check_vma=False)
    def step(q, k, v):
        def turn(carried, _):
            k, v, top, bottom = carried
            weights = jnp.exp(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 8.0)
            top = top + jnp.einsum("bhqk,bkhd->bqhd", weights, v)
            bottom = bottom + weights.sum(-1).transpose(0, 2, 1)[..., None]
            after = [(card, (card + 1) % cards) for card in range(cards)]
            return (lax.ppermute(k, "ring", after), lax.ppermute(v, "ring", after), top, bottom), None

        bottom = jnp.zeros((*q.shape[:3], 1))
        (_, _, top, bottom), _ = lax.scan(turn, (k, v, jnp.zeros_like(q), bottom), None, length=cards)
        return top / bottom

    one = S(where, P(None, "ring"), 2, 4096, 8, 64)
    return step, (one, one, one)


def gathered():
    where = mesh(data=2)

    @partial(jax.jit, out_shardings=NamedSharding(where, P()))
    def evaluate(weights, x):
        return jax.nn.softmax(jnp.tanh(x @ weights[0]) @ weights[1])

    weights = S(where, P("data"), 2048, 2048), S(where, P("data"), 2048, 1000)
    return evaluate, (weights, S(where, P("data"), 8192, 2048))


CASES = {
    function.__name__: function
    for function in (
        data_parallel, fully_sharded, sharded_optimizer, tensor_parallel, two_axes, mapped_sum, pipelined, experts,
        ring_attention, gathered,
    )
}  # fmt: skip
#: How many cards each wants.
CARDS = {
    "data_parallel": 2, "fully_sharded": 4, "sharded_optimizer": 2, "tensor_parallel": 2, "two_axes": 4,
    "mapped_sum": 2, "pipelined": 2, "experts": 4, "ring_attention": 4, "gathered": 2,
}  # fmt: skip
#: Arguments that take outputs of the call before: output by argument, None for all that is returned.
CARRIED = {
    "data_parallel": {0: 0, 1: 1}, "fully_sharded": {0: 0, 1: 1}, "sharded_optimizer": {0: 0, 1: 1},
    "tensor_parallel": {0: None}, "two_axes": {0: 0}, "mapped_sum": {0: None}, "pipelined": {0: None},
    "experts": {0: None}, "ring_attention": {}, "gathered": {},
}  # fmt: skip
PROGRAMS = ()
