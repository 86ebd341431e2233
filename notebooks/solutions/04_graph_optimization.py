# Solutions to notebook 04. Run them in the notebook, below its last cell: they use its variables.

# %% Your turn: transpose the weight now, give it the name of the node's output, and remove the node.
def fold_transposes(model):
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in [node for node in model.graph.node if node.op_type == "Transpose" and node.input[0] in weights]:
        (perm,) = (attribute.ints for attribute in node.attribute if attribute.name == "perm")
        turned = np.ascontiguousarray(numpy_helper.to_array(weights[node.input[0]]).transpose(perm))
        model.graph.initializer.append(numpy_helper.from_array(turned, node.output[0]))
        model.graph.node.remove(node)


# %% Exercise 1: no node more. Where it is not folded, the product with the table reads it transposed, as FusedMatMul.
options = onnxruntime.SessionOptions()
options.optimized_model_filepath, options.log_severity_level = str(folder / "unfolded.onnx"), 3
onnxruntime.InferenceSession(small / "decoder.onnx", options, disabled_optimizers=["ConstantFolding"])
unfolded = Counter(node.op_type for node in onnx.load(folder / "unfolded.onnx", load_external_data=False).graph.node)
assert unfolded.total() == counts["all"].total()
assert unfolded["FusedMatMul"] == counts["all"]["FusedMatMul"] + 1 and unfolded["MatMul"] == counts["all"]["MatMul"] - 1

# %% Exercise 2: for each layer and position, heads times width numbers of 4 bytes, read and written, for 8 sources.
moved_per_position = 2 * 4 * 8 * sum(dims.cross_heads) * dims.d_kv
source = -(-read_bytes // moved_per_position)
print(f"from {source} source tokens on")
assert 700 < source < 900

# %% Exercise 3: it keeps one of them, and both products read it.
twice = [("Transpose", "x", "t", swap), ("Transpose", "x", "u", swap), ("MatMul", "x t", "a", {}),
         ("MatMul", "x u", "b", {}), ("Add", "a b", "y", {})]  # fmt: skip
kinds = [node.op_type for node in rewritten(save("twice", twice, {}), "basic").graph.node]
assert kinds.count("Transpose") == 1 and len(kinds) < 5
