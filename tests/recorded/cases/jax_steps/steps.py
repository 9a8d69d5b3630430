"""Steps of JAX programs, as their authors write them. Each function gives a function and its arguments, as shapes.

A jitted function is called in a loop; one that is not jitted is a whole program, called once.
"""

from __future__ import annotations

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax import lax

F32, BF16, F16, I32 = jnp.float32, jnp.bfloat16, jnp.float16, jnp.int32


def S(*shape, t=F32):
    return jax.ShapeDtypeStruct(shape, t)


def sgd(params, grads, rate=0.1):
    return jax.tree.map(lambda w, g: w - (rate * g).astype(w.dtype), params, grads)


def dense(*sizes, t=F32):
    return [{"w": S(i, o, t=t), "b": S(o, t=t)} for i, o in zip(sizes, sizes[1:], strict=False)]


def perceptron(params, x, activation=jax.nn.relu):
    for layer in params[:-1]:
        x = activation(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


# --- perceptrons ------------------------------------------------------------------------------------------------------


def mlp():
    def loss(params, x, y):
        return cross_entropy(perceptron(params, x, jax.nn.gelu), y)

    @jax.jit
    def step(params, x, y):
        return sgd(params, jax.grad(loss)(params, x, y))

    return step, (dense(784, 1024, 1024, 1024, 10), S(2048, 784), S(2048, t=I32))


def mlp_adam_by_hand():
    def loss(params, x, y):
        return cross_entropy(perceptron(params, x), y)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, x, y):
        value, grads = jax.value_and_grad(loss)(params, x, y)
        count = state["count"] + 1
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["m"], grads)
        v = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, state["v"], grads)
        scale = 1e-3 * jnp.sqrt(1 - 0.999**count) / (1 - 0.9**count)
        params = jax.tree.map(lambda p, m, v: p - scale * m / (jnp.sqrt(v) + 1e-8), params, m, v)
        return params, {"m": m, "v": v, "count": count}, value

    params = dense(512, 2048, 2048, 100)
    return step, (params, {"m": params, "v": params, "count": S()}, S(1024, 512), S(1024, t=I32))


def odd_sizes():
    def loss(params, x):
        return jnp.mean(perceptron(params, x, jnp.tanh).astype(F32) ** 2)

    @jax.jit
    def step(params, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return sgd(params, grads), value

    return step, (dense(777, 1001, 333, 777, 13), S(1537, 777, t=BF16))


def dropout():
    def loss(params, x, key):
        for i, layer in enumerate(params):
            x = jnp.tanh(x @ layer["w"] + layer["b"])
            keep = jax.random.bernoulli(jax.random.fold_in(key, i), 0.9, x.shape)
            x = jnp.where(keep, x / 0.9, 0)
        return jnp.mean(x**2)

    @partial(jax.jit, donate_argnums=0)
    def step(params, key, x):
        key, own = jax.random.split(key)
        value, grads = jax.value_and_grad(loss)(params, x, own)
        return sgd(params, grads), key, value

    return step, (dense(1024, 1536, 1536, 256), jax.eval_shape(lambda: jax.random.key(0)), S(3000, 1024))


def accumulated():
    def loss(params, x, y):
        return cross_entropy(perceptron(params, x), y)

    @partial(jax.jit, donate_argnums=0)
    def step(params, xs, ys):
        def micro(total, batch):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(params, *batch)), None

        total, _ = lax.scan(micro, jax.tree.map(jnp.zeros_like, params), (xs, ys))
        return sgd(params, total, 0.1 / 8)

    return step, (dense(1024, 2048, 2048, 1000), S(8, 512, 1024), S(8, 512, t=I32))


def per_example():
    """Gradients example by example, clipped and with noise."""

    def loss(params, x, y):
        return cross_entropy(perceptron(params, x[None]), y[None])

    @jax.jit
    def step(params, key, x, y):
        grads = jax.vmap(jax.grad(loss), in_axes=(None, 0, 0))(params, x, y)
        norms = jax.vmap(optax.global_norm)(grads)
        scale = jnp.minimum(1, 1 / norms)
        summed = jax.tree.map(lambda g: jnp.einsum("b,b...->...", scale, g), grads)
        noisy = jax.tree.map(lambda g: g + jax.random.normal(key, g.shape), summed)
        return sgd(params, noisy), norms.mean()

    return step, (dense(784, 256, 256, 10), S(2, t=jnp.uint32), S(192, 784), S(192, t=I32))


def mixed_precision():
    """Half precision with a loss scale that follows the gradients."""

    def loss(params, x, y, scale):
        half = jax.tree.map(lambda w: w.astype(F16), params)
        return cross_entropy(perceptron(half, x.astype(F16)).astype(F32), y) * scale

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, scale, x, y):
        grads = jax.tree.map(lambda g: g / scale, jax.grad(loss)(params, x, y, scale))
        finite = jnp.all(jnp.array([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]))
        params = jax.tree.map(lambda w, g: jnp.where(finite, w - 0.1 * g, w), params, grads)
        return params, jnp.where(finite, scale, scale / 2)

    return step, (dense(1024, 4096, 4096, 1000), S(), S(1024, 1024), S(1024, t=I32))


def optax_chain():
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9, nesterov=True))

    def loss(params, x, y):
        return cross_entropy(perceptron(params, x), y)

    @jax.jit
    def step(params, state, average, x, y):
        value, grads = jax.value_and_grad(loss)(params, x, y)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        average = optax.incremental_update(params, average, 0.001)
        return params, state, average, {"loss": value, "norm": optax.global_norm(grads)}

    params = dense(600, 1500, 1500, 600)
    return step, (params, jax.eval_shape(optimizer.init, params), params, S(800, 600), S(800, t=I32))


def mixed_outputs():
    @jax.jit
    def step(params, x):
        logits = perceptron(params, x).astype(BF16)
        top, where = lax.top_k(logits, 5)
        counts = jnp.bincount(where[:, 0], length=1000)
        return {"logits": logits, "top": (top, where), "counts": counts, "mean": logits.mean(), "any": logits.any()}

    return step, (dense(512, 1024, 1000), S(4096, 512))


def host_batches():
    """The batch is NumPy's: every call brings it to the card."""

    def loss(params, x, y):
        return cross_entropy(perceptron(params, x), y)

    @partial(jax.jit, donate_argnums=0)
    def step(params, x, y):
        value, grads = jax.value_and_grad(loss)(params, x, y)
        return sgd(params, grads), value

    return step, (dense(3072, 1024, 1024, 10), np.zeros((1000, 3072), np.float32), np.zeros(1000, np.int32))


# --- convolutions -----------------------------------------------------------------------------------------------------

NHWC = ("NHWC", "HWIO", "NHWC")


def conv(x, w, stride=1):
    return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=NHWC)


def cnn():
    def loss(params, x, y):
        for w in params["convolutions"]:
            x = jax.nn.relu(conv(x, w))
        return cross_entropy(x.mean((1, 2)) @ params["head"], y)

    @jax.jit
    def step(params, x, y):
        return sgd(params, jax.grad(loss)(params, x, y))

    widths = [(3, 64), (64, 64), (64, 128), (128, 128)]
    params = {"convolutions": [S(3, 3, i, o) for i, o in widths], "head": S(128, 10)}
    return step, (params, S(32, 64, 64, 3), S(32, t=I32))


def resnet_norm():
    """Residual blocks with batch norms, whose running means are a state."""

    def norm(x, p, running):
        mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
        new = {"mean": 0.9 * running["mean"] + 0.1 * mean, "var": 0.9 * running["var"] + 0.1 * var}
        return (x - mean) * lax.rsqrt(var + 1e-5) * p["scale"] + p["bias"], new

    def loss(params, running, x, y):
        news = []
        x = conv(x, params["stem"], 2)
        for p, r in zip(params["blocks"], running, strict=True):
            h, first = norm(conv(x, p["a"]), p["na"], r[0])
            h, second = norm(conv(jax.nn.relu(h), p["b"]), p["nb"], r[1])
            x = jax.nn.relu(x + h)
            news.append((first, second))
        return cross_entropy(x.mean((1, 2)) @ params["head"], y), news

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, running, x, y):
        (value, running), grads = jax.value_and_grad(loss, has_aux=True)(params, running, x, y)
        return sgd(params, grads), running, value

    affine, stats = {"scale": S(64), "bias": S(64)}, {"mean": S(64), "var": S(64)}
    block = {"a": S(3, 3, 64, 64), "b": S(3, 3, 64, 64), "na": affine, "nb": affine}
    params = {"stem": S(7, 7, 3, 64), "blocks": [block] * 4, "head": S(64, 100)}
    return step, (params, [(stats, stats)] * 4, S(24, 96, 96, 3), S(24, t=I32))


class Unet(nn.Module):
    @nn.compact
    def __call__(self, x):
        skips = []
        for width in (32, 64, 128):
            x = nn.gelu(nn.GroupNorm(num_groups=8)(nn.Conv(width, (3, 3))(x)))
            skips.append(x)
            x = nn.avg_pool(x, (2, 2), (2, 2))
        x = nn.gelu(nn.Conv(256, (3, 3))(x))
        for width, skip in zip((128, 64, 32), skips[::-1], strict=True):
            x = nn.ConvTranspose(width, (2, 2), (2, 2))(x)
            x = nn.gelu(nn.Conv(width, (3, 3))(jnp.concatenate([x, skip], -1)))
        return nn.Conv(3, (1, 1))(x)


def flax_unet():
    model = Unet()

    def init(x):
        params = model.init(jax.random.key(0), x)
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))

    @partial(jax.jit, donate_argnums=0)
    def step(state, x, noise):
        value, grads = jax.value_and_grad(lambda p: jnp.mean((state.apply_fn(p, x + noise) - noise) ** 2))(state.params)
        return state.apply_gradients(grads=grads), value

    x = S(16, 64, 64, 3)
    return step, (jax.eval_shape(init, x), x, x)


def text_cnn():
    def loss(params, tokens, y):
        x = params["embedding"][tokens]
        pooled = []
        for w in params["filters"]:
            h = lax.conv_general_dilated(x, w, (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC"))
            pooled.append(jax.nn.relu(h).max(1))
        return cross_entropy(jnp.concatenate(pooled, -1) @ params["head"], y)

    @jax.jit
    def step(params, tokens, y):
        value, grads = jax.value_and_grad(loss)(params, tokens, y)
        return sgd(params, grads), value

    params = {"embedding": S(20000, 128), "filters": [S(n, 128, 100) for n in (3, 4, 5)], "head": S(300, 2)}
    return step, (params, S(256, 120, t=I32), S(256, t=I32))


# --- sequences --------------------------------------------------------------------------------------------------------


def norm(x):
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def block(p, x, heads=8, causal=False):
    b, s, d = x.shape
    q, k, v = jnp.split(norm(x) @ p["qkv"], 3, -1)
    q, k, v = (t.reshape(b, s, heads, d // heads).transpose(0, 2, 1, 3) for t in (q, k, v))
    scores = q @ k.transpose(0, 1, 3, 2) / (d // heads) ** 0.5
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones((s, s), bool)), scores, -1e9)
    a = jax.nn.softmax(scores, -1) @ v
    x = x + a.transpose(0, 2, 1, 3).reshape(b, s, d) @ p["o"]
    return x + jax.nn.gelu(norm(x) @ p["up"]) @ p["down"]


def weights(d, *lead, t=F32):
    return {"qkv": S(*lead, d, 3 * d, t=t), "o": S(*lead, d, d, t=t), "up": S(*lead, d, 4 * d, t=t),
            "down": S(*lead, 4 * d, d, t=t)}  # fmt: skip


def encoder_bf16():
    """Blocks recomputed one by one in bfloat16."""

    def loss(params, x):
        for p in params:
            x = jax.checkpoint(block)(p, x)
        return jnp.mean(x.astype(F32) ** 2)

    @jax.jit
    def step(params, x):
        return sgd(params, jax.grad(loss)(params, x))

    return step, ([weights(1024, t=BF16)] * 4, S(4, 512, 1024, t=BF16))


def scanned():
    """Twelve blocks in a scan, recomputed."""

    def loss(params, x):
        x, _ = lax.scan(lambda x, p: (jax.checkpoint(block)(p, x), None), x, params)
        return jnp.mean(x**2)

    @jax.jit
    def step(params, x):
        return sgd(params, jax.grad(loss)(params, x))

    return step, (weights(512, 12), S(4, 512, 512))


def scanned_policy():
    """The same with products kept, mixed precision, and AdamW: as in MaxText."""
    optimizer = optax.adamw(1e-3)
    kept = jax.checkpoint_policies.dots_with_no_batch_dims_saveable

    def loss(params, tokens):
        half = jax.tree.map(lambda w: w.astype(BF16), params)
        x = half["embedding"][tokens[:, :-1]]
        layer = jax.checkpoint(partial(block, causal=True), policy=kept, prevent_cse=False)
        x, _ = lax.scan(lambda x, p: (layer(p, x), None), x, half["layers"])
        return cross_entropy((norm(x) @ half["embedding"].T).astype(F32), tokens[:, 1:])

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, tokens):
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    params = {"layers": weights(512, 8), "embedding": S(16000, 512)}
    return step, (params, jax.eval_shape(optimizer.init, params), S(4, 513, t=I32))


def gpt():
    optimizer = optax.adamw(1e-3)

    def loss(params, tokens):
        x = params["embedding"][tokens[:, :-1]]
        for p in params["blocks"]:
            x = block(p, x, 12, causal=True)
        return cross_entropy(x @ params["embedding"].T, tokens[:, 1:])

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, tokens):
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    params = {"blocks": [weights(768)] * 6, "embedding": S(8192, 768)}
    return step, (params, jax.eval_shape(optimizer.init, params), S(4, 257, t=I32))


def attention():
    """``jax.nn.dot_product_attention``, grouped heads, a mask of lengths."""

    def loss(params, x, lengths):
        b, s, d = x.shape
        q = (x @ params["q"]).reshape(b, s, 16, 64)
        k, v = ((x @ params[name]).reshape(b, s, 4, 64) for name in ("k", "v"))
        mask = jnp.arange(s)[None, None, None, :] < lengths[:, None, None, None]
        a = jax.nn.dot_product_attention(q, k, v, mask=mask)
        return jnp.mean((a.reshape(b, s, d) @ params["o"]) ** 2)

    @jax.jit
    def step(params, x, lengths):
        value, grads = jax.value_and_grad(loss)(params, x, lengths)
        return sgd(params, grads), value

    params = {"q": S(1024, 1024), "k": S(1024, 256), "v": S(1024, 256), "o": S(1024, 1024)}
    return step, (params, S(4, 768, 1024), S(4, t=I32))


class Encoder(nn.Module):
    @nn.compact
    def __call__(self, tokens, train):
        x = nn.Embed(5000, 256)(tokens)
        for _ in range(3):
            h = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(8, dropout_rate=0.1, deterministic=not train)(h, h)
            h = nn.Dense(256)(nn.gelu(nn.Dense(1024)(nn.LayerNorm()(x))))
            x = x + nn.Dropout(0.1, deterministic=not train)(h)
        return nn.Dense(20)(x.mean(1))


def flax_encoder():
    model = Encoder()

    def init(tokens):
        params = model.init(jax.random.key(0), tokens, False)
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-4))

    @jax.jit
    def step(state, tokens, y, key):
        def loss(params):
            return cross_entropy(state.apply_fn(params, tokens, True, rngs={"dropout": key}), y)

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    tokens = S(32, 128, t=I32)
    return step, (jax.eval_shape(init, tokens), tokens, S(32, t=I32), jax.eval_shape(lambda: jax.random.key(0)))


def lstm():
    def cell(p, carry, x):
        h, c = carry
        i, f, g, o = jnp.split(x @ p["x"] + h @ p["h"] + p["b"], 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    def loss(params, tokens):
        x = params["embedding"][tokens].swapaxes(0, 1)
        for p in params["layers"]:
            zeros = jnp.zeros((x.shape[1], 512))
            _, x = lax.scan(partial(cell, p), (zeros, zeros), x)
        return cross_entropy(x[:-1] @ params["head"], tokens.T[1:])

    @jax.jit
    def step(params, tokens):
        value, grads = jax.value_and_grad(loss)(params, tokens)
        return sgd(params, grads), value

    layer = {"x": S(512, 2048), "h": S(512, 2048), "b": S(2048)}
    params = {"embedding": S(4000, 512), "layers": [layer] * 2, "head": S(512, 4000)}
    return step, (params, S(32, 64, t=I32))


def lora():
    """Frozen weights, and small matrices that are trained."""

    def adapted(p, a):
        return {name: w + a[name]["a"] @ a[name]["b"] for name, w in p.items()}

    def loss(adapters, params, x):
        for p, a in zip(params, adapters, strict=True):
            x = jax.checkpoint(block)(adapted(p, a), x)
        return jnp.mean(x**2)

    @partial(jax.jit, donate_argnums=0)
    def step(adapters, params, x):
        value, grads = jax.value_and_grad(loss)(adapters, params, x)
        return sgd(adapters, grads), value

    params = [weights(768)] * 3
    adapters = jax.tree.map(lambda w: {"a": S(w.shape[0], 8), "b": S(8, w.shape[1])}, params)
    return step, (adapters, params, S(4, 384, 768))


def decode():
    """One token with a cache of keys and values that is written in place."""

    @partial(jax.jit, donate_argnums=1)
    def step(params, cache, token, position):
        x = params["embedding"][token][:, None]
        new = []
        for p, (ks, vs) in zip(params["blocks"], cache, strict=True):
            q, k, v = (t.reshape(-1, 1, 16, 64) for t in jnp.split(norm(x) @ p["qkv"], 3, -1))
            ks = lax.dynamic_update_slice(ks, k, (0, position, 0, 0))
            vs = lax.dynamic_update_slice(vs, v, (0, position, 0, 0))
            mask = jnp.arange(ks.shape[1])[None, None, None, :] <= position
            a = jax.nn.dot_product_attention(q, ks, vs, mask=mask)
            x = x + a.reshape(-1, 1, 1024) @ p["o"]
            x = x + jax.nn.gelu(norm(x) @ p["up"]) @ p["down"]
            new.append((ks, vs))
        return jnp.argmax(x[:, 0] @ params["embedding"].T, -1), new

    cache = [(S(8, 1024, 16, 64, t=BF16), S(8, 1024, 16, 64, t=BF16))] * 4
    params = {"blocks": [weights(1024, t=BF16)] * 4, "embedding": S(32000, 1024, t=BF16)}
    return step, (params, cache, S(8, t=I32), S(t=I32))


def mixture():
    """Experts, each token at its best one, as einsums with a capacity."""

    def loss(params, x):
        scores = jax.nn.softmax(x @ params["router"], -1)
        best = jnp.argmax(scores, -1)
        chosen = jax.nn.one_hot(best, 8)
        place = (jnp.cumsum(chosen, 0) - 1) * chosen
        where = jax.nn.one_hot(place.sum(-1).astype(I32), 320) * chosen.max(-1, keepdims=True)
        dispatch = jnp.einsum("te,tc->tec", chosen, where)
        h = jnp.einsum("tec,td->ecd", dispatch, x)
        h = jax.nn.silu(jnp.einsum("ecd,edf->ecf", h, params["up"]))
        y = jnp.einsum("ecf,efd->ecd", h, params["down"])
        return jnp.mean((x + jnp.einsum("tec,ecd->td", dispatch * scores[:, :, None], y)) ** 2)

    @partial(jax.jit, donate_argnums=0)
    def step(params, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return sgd(params, grads), value

    return step, ({"router": S(512, 8), "up": S(8, 512, 1024), "down": S(8, 1024, 512)}, S(2048, 512))


# --- other numerics ---------------------------------------------------------------------------------------------------


def sorting():
    @jax.jit
    def step(x, keys):
        order = jnp.argsort(keys, axis=-1)
        ranked = jnp.take_along_axis(x, order, -1)
        total = jnp.cumsum(ranked, -1)
        return lax.sort((keys, x), num_keys=1)[1], total / total[:, -1:], jnp.quantile(x, 0.9, axis=-1)

    return step, (S(512, 20000), S(512, 20000))


def spectral():
    """A Fourier layer."""

    def loss(params, x):
        for w in params:
            modes = jnp.fft.rfft2(x, axes=(1, 2))[:, :16, :16]
            mixed = jnp.einsum("bxyi,xyio->bxyo", modes, lax.complex(w["re"], w["im"]))
            full = jnp.zeros((x.shape[0], 64, 33, x.shape[-1]), jnp.complex64).at[:, :16, :16].set(mixed)
            x = jax.nn.gelu(jnp.fft.irfft2(full, axes=(1, 2)) + x)
        return jnp.mean(x**2)

    @jax.jit
    def step(params, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return sgd(params, grads), value

    return step, ([{"re": S(16, 16, 32, 32), "im": S(16, 16, 32, 32)}] * 3, S(16, 64, 64, 32))


def ode():
    """A loop whose number of turns is data, a branch in it."""

    @partial(jax.jit, donate_argnums=0)
    def step(y, t):
        def field(y):
            return jnp.tanh(y @ y.T @ y / y.shape[0])

        def body(state):
            y, h, n = state
            whole, half = y + h * field(y), y + h / 2 * field(y)
            twice = half + h / 2 * field(half)
            error = jnp.abs(whole - twice).max()
            return lax.cond(error < 1e-3, lambda: (twice, h * 1.5, n + 1), lambda: (y, h / 2, n + 1))

        y, _, turns = lax.while_loop(lambda s: (s[2] < t) & (s[1] > 1e-6), body, (y, jnp.float32(0.1), 0))
        return y, turns

    return step, (S(1200, 700), S(t=I32))


def graph_network():
    def loss(params, nodes, senders, receivers):
        for p in params:
            messages = jax.nn.relu(jnp.concatenate([nodes[senders], nodes[receivers]], -1) @ p["message"])
            summed = jax.ops.segment_sum(messages, receivers, nodes.shape[0])
            nodes = nodes + jax.nn.relu(summed @ p["update"])
        return jnp.mean(nodes**2)

    @jax.jit
    def step(params, nodes, senders, receivers):
        value, grads = jax.value_and_grad(loss)(params, nodes, senders, receivers)
        return sgd(params, grads), value

    params = [{"message": S(256, 128), "update": S(128, 128)}] * 3
    return step, (params, S(5000, 128), S(60000, t=I32), S(60000, t=I32))


def gaussian_process():
    """A Cholesky factor and triangular solves."""

    def loss(params, x, y):
        squares = (x**2).sum(-1)
        distance = squares[:, None] + squares[None] - 2 * x @ x.T
        kernel = jnp.exp(params["amplitude"] - distance * jnp.exp(params["scale"])) + 1e-3 * jnp.eye(len(x))
        factor = jnp.linalg.cholesky(kernel)
        alpha = jax.scipy.linalg.solve_triangular(factor, y, lower=True)
        return 0.5 * alpha @ alpha + jnp.log(jnp.diagonal(factor)).sum()

    @jax.jit
    def step(params, x, y):
        value, grads = jax.value_and_grad(loss)(params, x, y)
        return sgd(params, grads, 1e-3), value

    return step, ({"amplitude": S(), "scale": S()}, S(1500, 16), S(1500))


# --- whole programs ---------------------------------------------------------------------------------------------------


def gan():
    """Two jitted functions in turn, in a Python loop."""
    generator, critic = dense(64, 512, 512, 784), dense(784, 512, 512, 1)

    def critic_loss(critic, generator, z, x):
        fake = perceptron(generator, z)
        return jax.nn.softplus(perceptron(critic, fake)).mean() + jax.nn.softplus(-perceptron(critic, x)).mean()

    def generator_loss(generator, critic, z):
        return jax.nn.softplus(-perceptron(critic, perceptron(generator, z))).mean()

    @jax.jit
    def critic_step(critic, generator, z, x):
        return sgd(critic, jax.grad(critic_loss)(critic, generator, z, x))

    @partial(jax.jit, donate_argnums=0)
    def generator_step(generator, critic, z):
        value, grads = jax.value_and_grad(generator_loss)(generator, critic, z)
        return sgd(generator, grads), value

    def train(generator, critic, z, x):
        for _ in range(3):
            for _ in range(2):
                critic = critic_step(critic, generator, z, x)
            generator, value = generator_step(generator, critic, z)
        return generator, critic, value

    return train, (generator, critic, S(1024, 64), S(1024, 784))


def eager_around():
    """Data made, scaled and summed up outside the jitted step."""

    def loss(params, x, y):
        return jnp.mean((perceptron(params, x) - y) ** 2)

    @partial(jax.jit, donate_argnums=0)
    def step(params, x, y):
        value, grads = jax.value_and_grad(loss)(params, x, y)
        return sgd(params, grads), value

    def train(params, x, y):
        total = jnp.zeros(())
        for _ in range(3):
            scaled = (x - x.mean(0)) / (x.std(0) + 1e-6)
            target = jnp.concatenate([y, -y], axis=1)
            params, value = step(params, scaled, target)
            total = total + value
        return params, total / 3

    return train, (dense(400, 900, 900, 200), S(2500, 400), S(2500, 100))


def evaluated():
    """Training and, after every second step, an evaluation by another jitted function."""

    def loss(params, x, y):
        return cross_entropy(perceptron(params, x), y)

    @jax.jit
    def train_step(params, x, y):
        value, grads = jax.value_and_grad(loss)(params, x, y)
        return sgd(params, grads), value

    @jax.jit
    def accuracy(params, x, y):
        return (perceptron(params, x).argmax(-1) == y).mean()

    def train(params, x, y, held_out, labels):
        found = []
        for turn in range(4):
            params, _ = train_step(params, x, y)
            if turn % 2:
                found.append(accuracy(params, held_out, labels))
        return params, jnp.stack(found)

    return train, (dense(784, 800, 800, 10), S(512, 784), S(512, t=I32), S(10000, 784), S(10000, t=I32))


# --- kept back: recorded when the rules were fixed, and predicted then ------------------------------------------------


def closed_over():
    """An array of the card and one of NumPy that the function closes over."""
    table, offset = jnp.ones((2048, 2048)), np.ones((512, 2048), np.float32)

    @jax.jit
    def step(x):
        return {"y": x @ table + offset}

    return step, (S(512, 2048),)


def policy_gradient():
    """A rollout in a scan, returns in another, minibatches in a third."""
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(3e-4))

    def network(params, x):
        return jnp.tanh(x @ params["a"]) @ params["b"], (x @ params["v"])[..., 0]

    def act(params, state, key):
        logits, value = network(params, state)
        action = jax.random.categorical(key, logits)
        after = state + 0.01 * jax.random.normal(key, state.shape) * (action[:, None] - 1)
        chosen = jax.nn.log_softmax(logits)[jnp.arange(len(action)), action]
        return after, (state, action, -jnp.abs(after).sum(-1), value, chosen)

    def loss(params, batch):
        x, action, returned, before = batch
        logits, value = network(params, x)
        now = jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], -1)[:, 0]
        ratio, advantage = jnp.exp(now - before), returned - value
        clipped = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
        return ((returned - value) ** 2).mean() - clipped.mean()

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, games, key):
        games, (x, action, reward, value, chosen) = lax.scan(partial(act, params), games, jax.random.split(key, 128))

        def discount(total, now):
            total = now[0] + 0.99 * total - 0.01 * now[1]
            return total, total

        _, returned = lax.scan(discount, jnp.zeros(games.shape[0]), (reward, value), reverse=True)

        def update(carried, batch):
            params, state = carried
            updates, state = optimizer.update(jax.grad(loss)(params, batch), state, params)
            return (optax.apply_updates(params, updates), state), None

        batches = jax.tree.map(lambda t: t.reshape(8, -1, *t.shape[2:]), (x, action, returned, chosen))
        (params, state), _ = lax.scan(update, (params, state), batches)
        return params, state, reward.mean()

    params = {"a": S(64, 256), "b": S(256, 6), "v": S(64, 1)}
    return step, (params, jax.eval_shape(optimizer.init, params), S(1024, 64), S(2, t=jnp.uint32))


def quantised():
    """Products of eight-bit integers."""

    @jax.jit
    def step(layers, x):
        for layer in layers:
            scale = jnp.abs(x).max(-1, keepdims=True) / 127
            whole = jnp.round(x / scale).astype(jnp.int8)
            product = lax.dot_general(whole, layer["q"], (((1,), (0,)), ((), ())), preferred_element_type=I32)
            x = jax.nn.silu(product.astype(BF16) * scale * layer["scale"])
        return x, x.sum()

    return step, ([{"q": S(2048, 2048, t=jnp.int8), "scale": S(2048, t=BF16)}] * 4, S(1024, 2048, t=BF16))


class MaskedEncoder(nn.Module):
    @nn.compact
    def __call__(self, tokens, mask):
        x = nn.Embed(30522, 384)(tokens) + self.param("places", nn.initializers.normal(), (1, 128, 384))
        for _ in range(4):
            a = nn.SelfAttention(6, dtype=BF16)(x, mask=nn.make_attention_mask(mask, mask))
            x = nn.LayerNorm()(x + a)
            x = nn.LayerNorm()(x + nn.Dense(384, dtype=BF16)(nn.gelu(nn.Dense(1536, dtype=BF16)(x))))
        return nn.Dense(30522, dtype=BF16)(x)


def masked_words():
    model = MaskedEncoder()

    @jax.jit
    def step(params, tokens, mask, labels):
        def loss(params):
            logits = model.apply(params, tokens, mask).astype(F32)
            return (optax.softmax_cross_entropy_with_integer_labels(logits, labels) * mask).sum() / mask.sum()

        value, grads = jax.value_and_grad(loss)(params)
        return sgd(params, grads), value

    tokens = S(16, 128, t=I32)
    params = jax.eval_shape(model.init, jax.eval_shape(lambda: jax.random.key(0)), tokens, tokens)
    return step, (params, tokens, S(16, 128), tokens)


def printed():
    """``jax.debug.print`` inside of a jitted step."""

    @jax.jit
    def step(params, x):
        y = params["w"] @ x
        jax.debug.print("mean {mean}", mean=y.mean())
        return {"w": params["w"] - y @ x.T}

    return step, ({"w": S(1024, 1024)}, S(1024, 512))


def logged():
    """Eager training that keeps norms and prints some."""

    def train(w, x):
        norms = []
        for turn in range(4):
            y = jnp.tanh(x @ w)
            w = w - 0.1 * (x.T @ y) / len(x)
            norms.append(jnp.linalg.norm(w))
            if turn % 2:
                print(f"{float(norms[-1]):.2f}")
        return w, jnp.stack(norms)

    return train, (S(1000, 800), S(3000, 1000))


CASES = {
    function.__name__: function
    for function in (
        mlp, mlp_adam_by_hand, odd_sizes, dropout, accumulated, per_example, mixed_precision, optax_chain,
        mixed_outputs, host_batches, cnn, resnet_norm, flax_unet, text_cnn, encoder_bf16, scanned, scanned_policy, gpt,
        attention, flax_encoder, lstm, lora, decode, mixture, sorting, spectral, ode, graph_network, gaussian_process,
        gan, eager_around, evaluated, closed_over, policy_gradient, quantised, masked_words, printed, logged,
    )
}  # fmt: skip
#: How the loop around a jitted step goes on: argument -> the output that takes its place, None for the whole output.
#: Where nothing is said, the first output takes the place of the first argument.
CARRIED = {
    **dict.fromkeys(("mlp", "accumulated", "cnn", "encoder_bf16", "scanned", "printed"), {0: None}),
    **dict.fromkeys(("mlp_adam_by_hand", "dropout", "mixed_precision", "resnet_norm", "scanned_policy", "gpt",
                     "policy_gradient"),
                    {0: 0, 1: 1}),
    "optax_chain": {0: 0, 1: 1, 2: 2},
    "closed_over": {},
    "mixed_outputs": {},
    "quantised": {},
    "sorting": {},
    "decode": {1: 1, 2: 0},
}  # fmt: skip
PROGRAMS = ("gan", "eager_around", "evaluated", "logged")
