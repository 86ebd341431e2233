# Solutions to notebook 05. Run them in the notebook, below its last cell: they use its variables.

# %% Your turn: the node that makes a large number, and every node that reads one.
def nodes_in_fp32(graph, largest):
    large = {name for name, size in largest.items() if size > END / 8}
    return [node.name for node in graph.node if large.intersection([*node.input, *node.output])]


# %% Exercise 1: it stops where the step between neighbours is 2: at 2 to the power of (fraction bits + 1).
for dtype, end in ((torch.float16, 2048), (torch.bfloat16, 256)):
    total = torch.tensor(0, dtype=dtype)
    for _ in range(3000):
        total = total + 1
    assert total == end
# A product of matrices adds up hundreds of numbers, so hardware adds in fp32 and rounds once.

# %% Exercise 2: at the first power of two that lifts the stream's largest number beyond the end.
first = next(factor for factor in (2**n for n in range(1, 12)) if max(streams) * factor > END)
for factor, fails in ((first // 4, False), (first, True)):
    with warnings.catch_warnings(action="ignore"):
        graph = export(scale_residual_stream(models[torch.float32], factor))
    assert np.isnan(to_the_letter(converted(graph, inside))[0]).any() == fails, factor

# %% Exercise 3: wo is fp32, so its output is; the sum of fp16 and fp32 is fp32, and the stream stays so from there on.
half = models[torch.float16]
with torch.no_grad():
    streams_in = half.encoder(**source, output_hidden_states=True).hidden_states
print([str(layer.dtype) for layer in streams_in])
assert half.encoder.block[0].layer[1].DenseReluDense.wo.weight.dtype == torch.float32
