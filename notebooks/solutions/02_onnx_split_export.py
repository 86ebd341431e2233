# Solutions to notebook 02. Run them in the notebook, below its last cell: they use its variables.

# %% Your turn: the first past is a tensor of no rows; every later one is what the step before returned.
def generate_with_onnx(inputs):
    names = [tensor.name for tensor in decoder.get_inputs()]
    cross = dict(zip(names[2:10], encoder.run(None, inputs), strict=True))
    tokens, past = [0], [np.zeros((1, 8, 0, 32), np.float32)] * 8
    while tokens[-1] != 1:
        fed = {"token": np.array([tokens[-1:]]), "mask": inputs["mask"]}
        logits, *past = decoder.run(None, {**fed, **cross, **dict(zip(names[10:], past, strict=True))})
        tokens.append(int(logits[0, -1].argmax()))
    return tokens


# %% Exercise 1: with a weight q, k, v, o; q, o of cross-attention; two of the feed-forward; and the head, once. Of two
# tensors: queries with keys, and attention's weights with values, in both attentions.
graph, layers = onnx.load(HERE / "two" / "decoder.onnx").graph, model.config.num_decoder_layers
weights = {tensor.name for tensor in graph.initializer}
products = [bool(weights & {*node.input}) for node in graph.node if node.op_type == "MatMul"]
print(f"{sum(products)} with a weight, {len(products) - sum(products)} of two tensors")
assert (sum(products), len(products) - sum(products)) == (8 * layers + 1, 4 * layers)


# %% Exercise 2: the example's sum is positive, so the graph returns its input, whatever the sum.
class Positive(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


torch.onnx.export(
    Positive().eval(), (torch.ones(2),), HERE / "if.onnx", input_names=["x"], output_names=["y"], dynamo=False
)
negative = -np.ones(2, np.float32)
(found,) = onnxruntime.InferenceSession(HERE / "if.onnx").run(None, {"x": negative})
assert (found == negative).all() and Positive()(torch.from_numpy(negative)).tolist() == [1, 1]

# %% Exercise 3: (B, K, T) tokens; the source's tensors have no axis for rows.
backend = minis["two graphs"]
read, answer = backend.encode(rows[:1], mask[:1]), np.array([[[0, 416, 50, 180]]])
at_once, one_by_one = backend.new_state(read), backend.new_state(read)
whole = backend.step(at_once, answer)
parts = np.concatenate([backend.step(one_by_one, answer[:, :, [place]]) for place in range(4)], axis=2)
np.testing.assert_allclose(whole, parts, atol=1e-3)
beams = backend.new_state(read, rows_per_source=4)
backend.step(beams, np.zeros((1, 4, 1), np.int64))
assert beams.past[0].shape[:2] == (1, 4) and beams.source.inputs["cross_key_0"].shape[:2] == (1, 8)
