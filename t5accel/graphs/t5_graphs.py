"""T5's encoder and its decoder step as ONNX graphs, built from the weights of a checkpoint, operator by operator.

Nothing is traced: no exporter has to understand transformers' code, and the graphs are those that we mean. The encoder
ends in the keys and values of cross-attention; the decoder takes one step. Shapes are those of `contract`, and layers
those of `t5_layers`.
"""

from __future__ import annotations

from t5accel.graphs.builder import GraphBuilder
from t5accel.graphs.contract import GraphSpec, decoder_spec, encoder_spec
from t5accel.graphs.t5_layers import T5Layers
from t5accel.graphs.t5_weights import T5Weights


def encoder_graph(weights: T5Weights) -> GraphBuilder:
    """``input_ids``, ``attention_mask`` (B, S) -> ``cross_key_i``, ``cross_value_i`` (B, H_i, S, d_kv)."""
    graph = GraphBuilder("encoder")
    graph.declare(encoder_spec(weights.dims))
    layers = T5Layers(graph, weights, "encoder")
    layers.cross_keys_and_values(layers.encoder(), "cross")
    return graph


def decoder_graph(weights: T5Weights, *, head_by_rows: bool = False) -> GraphBuilder:
    """One step: new tokens, masks, the history and the cross tensors -> logits and the longer history.

    Args:
        weights: of the model.
        head_by_rows: store the head's weight as (V, d_model), as `T5Layers.head_weight` explains.

    >>> from t5accel.graphs.export import t5_weights
    >>> from t5accel.lively import random_t5
    >>> model = random_t5(dict(d_model=8, d_kv=6, d_ff=16, num_heads=2, num_layers=1, vocab_size=32))
    >>> [output.name for output in decoder_graph(t5_weights(model)).proto().graph.output]
    ['logits', 'present_key_0', 'present_value_0']
    """
    layers, hidden = headless_decoder("decoder", weights, decoder_spec(weights.dims))
    layers.head(hidden, output="logits", by_rows=head_by_rows)
    return layers.graph


def headless_decoder(name: str, weights: T5Weights, spec: GraphSpec) -> tuple[T5Layers, str]:
    """A graph with the decoder's layers, to which a head is still to be added.

    Args:
        name: of the graph.
        weights: of the model.
        spec: the inputs and outputs, those of `contract.decoder_spec` among them.

    Returns:
        The layers, in their graph, and the name of what the head reads: (B, K, T, d_model), normed and scaled.
    """
    graph = GraphBuilder(name)
    graph.declare(spec)
    layers = T5Layers(graph, weights, "decoder")
    hidden = layers.embed()  # (B, K, T, d_model)
    bias_of = layers.biases.on_past(rows=True)
    source_bias = layers.biases.of_mask("attention_mask")
    hidden = layers.decoder(hidden, bias_of, source_bias, cross="cross", past="past", present="present", rows=True)
    return layers, hidden
