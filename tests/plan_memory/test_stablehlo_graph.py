"""StableHLO as a graph: sizes, calls, loops, donated arguments. Needs JAX, but for the first test."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from graphmem import peak
from graphmem.errors import SourceError
from graphmem.plan_memory import Graph, from_stablehlo, offsets, reorder

needs_jax = pytest.mark.skipif(find_spec("jax") is None, reason="JAX is not installed")

_TWO_CALLS = """
module {
  func.func public @main(%w: tensor<64x64xbf16> {jax.buffer_donor = true}, %x: tensor<8x64xbf16>) -> tensor<8x64xbf16> {
    %0 = call @layer(%w, %x) : (tensor<64x64xbf16>, tensor<8x64xbf16>) -> tensor<8x64xbf16>
    %1 = call @layer(%w, %0) : (tensor<64x64xbf16>, tensor<8x64xbf16>) -> tensor<8x64xbf16>
    %2 = stablehlo.reshape %1 : (tensor<8x64xbf16>) -> tensor<512xbf16>
    %3 = stablehlo.reshape %2 : (tensor<512xbf16>) -> tensor<8x64xbf16>
    return %3 : tensor<8x64xbf16>
  }
  func.func private @layer(%w: tensor<64x64xbf16>, %x: tensor<8x64xbf16>) -> tensor<8x64xbf16> {
    %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<8x64xbf16>, tensor<64x64xbf16>) -> tensor<8x64xbf16>
    %1 = stablehlo.tanh %0 : tensor<8x64xbf16>
    return %1 : tensor<8x64xbf16>
  }
}
"""  # noqa: E501 what JAX writes


def _kinds(graph: Graph) -> list[str]:
    return [node.name.split()[1] for node in graph.nodes]


@pytest.mark.parametrize("given", [3, None, b"module {}"])
def test_what_is_no_program_is_refused(given: object) -> None:
    with pytest.raises(SourceError, match="is no StableHLO; give its text"):
        from_stablehlo(given)


@pytest.mark.skipif(find_spec("jax") is not None, reason="JAX is installed")
def test_without_jax_it_is_said_what_to_install() -> None:
    with pytest.raises(SourceError, match="pip install jax"):
        from_stablehlo("module {}")


@needs_jax
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hello", "this is no StableHLO: .*'hello' is unknown"),
        ("module {}", "no function main"),
        ("func.func @main(%a: tensor<?x2xf32>) -> tensor<?x2xf32> { return %a : tensor<?x2xf32> }", "without sizes"),
    ],
)
def test_what_cannot_be_read_is_one_message(text: str, words: str) -> None:
    with pytest.raises(SourceError, match=words):
        from_stablehlo(text)


@needs_jax
def test_calls_stand_where_they_are_and_reshapes_are_views() -> None:
    graph = from_stablehlo(_TWO_CALLS)
    assert _kinds(graph) == 2 * ["stablehlo.dot_general", "stablehlo.tanh"]
    assert [(one.bytes, one.held) for one in graph.buffers[:2]] == [(8192, False), (1024, True)]
    assert [graph.buffers[one].bytes for one in graph.outputs] == [1024]
    assert peak(graph, "live") == 8192 + 3 * 1024


@needs_jax
def test_a_loop_holds_what_its_body_does_and_carries_weights_as_they_are() -> None:
    import jax
    import jax.numpy as jnp
    from jax import lax

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=3)[0]

    shapes = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((8, 64), jnp.float32)
    graph = from_stablehlo(jax.jit(step).lower(*shapes))
    (loop,) = (node for node in graph.nodes if "while" in node.name)
    assert [graph.buffers[one].bytes for one in loop.makes] == [4, 8 * 64 * 4]  # the counter and x, not w
    assert 2 * 8 * 64 * 4 <= loop.scratch < 3 * 8 * 64 * 4
    assert loop.module == "jit(step)/while"


@needs_jax
def test_the_gradients_of_a_model_are_its_outputs_and_all_have_addresses() -> None:
    import jax
    import jax.numpy as jnp

    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for weight in weights:
            x = jax.nn.gelu(x @ weight)
        return jnp.square(x).mean()

    shapes = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 4, jax.ShapeDtypeStruct((512, 256), jnp.float32)
    graph = from_stablehlo(jax.jit(jax.grad(loss)).lower(*shapes))
    assert [graph.buffers[one].bytes for one in graph.outputs] == [256 * 256 * 4] * 4
    plan = offsets(graph, time_limit=1)
    assert None not in plan.addresses
    assert plan.height >= peak(graph, "live")


@needs_jax
def test_two_branches_run_one_after_the_other() -> None:
    import jax
    import jax.numpy as jnp

    def both(x: jax.Array) -> jax.Array:
        left, right = jnp.exp(jnp.outer(x, x)), jnp.sin(jnp.outer(x, x))
        return left.sum(0) + right.sum(0)

    graph = from_stablehlo(jax.jit(both).lower(jax.ShapeDtypeStruct((1024,), jnp.float32)))
    whole = 1024 * 1024 * 4
    assert reorder(graph).peak < peak(graph, "live") - whole // 2
