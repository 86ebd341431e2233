# Solutions to notebook 21. Run them in the notebook, below its last cell: they use its variables.


# %% Your turn: the fused node takes the place of the norm, where the inputs of the addition are known, too.
def fuse_sum_and_norm(model):
    nodes = model.graph.node
    for norm in [node for node in nodes if node.op_type == "SimplifiedLayerNormalization"]:
        add = next(node for node in nodes if norm.input[0] in node.output)
        inputs, outputs = [*add.input, norm.input[1]], [norm.output[0], "", "", add.output[0]]
        kind, about = "SkipSimplifiedLayerNormalization", {"domain": "com.microsoft", "epsilon": 1e-6}
        nodes.insert(list(nodes).index(norm), helper.make_node(kind, inputs, outputs, **about))
        nodes.remove(add)
        nodes.remove(norm)


# %% Exercise 1: free columns are never read. A masked one is: its share is 0, and 0 times NaN is NaN.
session = ort.InferenceSession(paths["in place"])
room = {name: np.concatenate([feeds[name], np.full_like(feeds[name], np.nan)], axis=2) for name in CACHE}
inputs = {**feeds, **room, "length": np.array([PAST], np.int32)}
(output,) = session.run([f"normed_{LAYERS}"], inputs)
print("NaN in the free columns: differs by", np.abs(output - expected[0]).max())
assert np.abs(output - expected[0]).max() < 1e-3
inputs["bias"] = feeds["bias"].copy()
inputs["bias"][..., 7] = -np.inf
for name in CACHE:
    room[name][:, :, 7] = np.nan
(output,) = session.run([f"normed_{LAYERS}"], inputs)
print("NaN under the mask:", output.ravel()[:3], "- what is masked must be finite")
assert np.isnan(output).all()

# %% Exercise 2: weights of four matrices in a layer against keys and values, read and written.
even = 4 * MODEL * MODEL // (2 * 2 * MODEL)
weights_mb, moved_mb = (LAYERS * MODEL * some * 4 / 1e6 for some in (4 * MODEL, 4 * even))
print(f"{even} tokens: {weights_mb:.1f} MB of weights, {moved_mb:.1f} MB moved")
longer = {name: rng.normal(size=(1, HEADS, 2 * even, WIDTH)).astype(np.float32) for name in CACHE}
feeds = {**feeds, **longer, "bias": rng.normal(size=(1, HEADS, 1, 2 * even + 1)).astype(np.float32)}
for past in (even // 4, 2 * even):
    both = {name: bound_step(paths[name], past) for name in ("as written", "in place")}
    systems = [
        Candidate(name, lambda run=run: [run() for _ in range(10)], Work(1, past, 10)) for name, run in both.items()
    ]
    print(f"history {past}: in place {compare(*systems, rounds=7).ratio('in place'):.2f}x")

# %% Exercise 3: no error, and wrong numbers. Such a file belongs to the processor for which it was written.
filters = rng.normal(size=(32, 32, 3, 3)).astype(np.float32)
image = {"x": rng.normal(size=(1, 32, 8, 8)).astype(np.float32)}
model = onnx.load(save("conv", [helper.make_node("Conv", ["x", "w"], ["y"])], ["x"], ["y"], {"w": filters}))
model.graph.input[0].type.CopyFrom(helper.make_tensor_type_proto(TensorProto.FLOAT, [1, 32, 8, 8]))
options = ort.SessionOptions()
options.optimized_model_filepath, options.log_severity_level = str(folder / "laid-out.onnx"), 3
right = ort.InferenceSession(model.SerializeToString(), options).run(None, image)[0]
laid_out = onnx.load(folder / "laid-out.onnx")
kept = numpy_helper.to_array(laid_out.graph.initializer[0])


def in_blocks(n):
    """Weights (out, in, 3, 3), both channel axes cut into blocks of n, which become the innermost axes."""
    blocks = filters.reshape(32 // n, n, 32 // n, n, 3, 3).transpose(0, 2, 4, 5, 3, 1)
    return np.ascontiguousarray(blocks).reshape(filters.shape)


here = next((n for n in (4, 8, 16, 32) if kept.size == filters.size and np.array_equal(in_blocks(n), kept)), None)
print(f"blocks of {here} here" if here else "this processor keeps the weights of a convolution as they are")
errors = {}
for n in (here, 8 if here == 16 else 16) if here else ():
    laid_out.graph.initializer[0].CopyFrom(numpy_helper.from_array(in_blocks(n), laid_out.graph.initializer[0].name))
    errors[n] = np.abs(ort.InferenceSession(laid_out.SerializeToString()).run(None, image)[0] - right).max()
    print(f"weights in blocks of {n}: no error; numbers up to {np.abs(right).max():.0f}, wrong by {errors[n]:.2g}")
assert not here or errors.pop(here) < 1e-3 < 1 < min(errors.values())
