# Solutions to notebook 28. Run them in the notebook, below its last cell: they use its variables.


# %% Your turn: a product of (n, k) and (k, m) takes n * k * m multiplications.
def multiplications(tokens, heads, neurons, width=128, size=32):
    of_pairs = 2 * tokens * tokens * heads * size
    return 4 * tokens * width * heads * size + of_pairs + 2 * tokens * width * neurons


# %% Exercise 1: where the products of each pair of tokens are as many as those of each token.
heads, neurons = (sum(sizes) for sizes in widths(reader).values())
equal = (4 * 128 * heads * 32 + 2 * 128 * neurons) // (2 * heads * 32)
print(f"at {equal} tokens")
linear = whole - 2 * 128 * 512 - 2 * heads * 32 * 512**2  # of 512 tokens, as PyTorch counts them
assert 2 * heads * 32 * equal == linear / 512

# %% Exercise 2: the higher the threshold, the rarer it abstains: more answers where there are some, and where not.
moved = {}
for by in (-5, 0, 5):
    asked = answerer(tokenizer, runs["PyTorch"], threshold=reader.config.null_score_diff_threshold + by)
    moved[by] = evaluation.evaluate(asked, names=["questions"]).questions
    print(f"{by:+}: F1 {moved[by].has_answer.f1:.1f}, right abstentions {moved[by].no_answer.exact_match:.1f}")
assert moved[-5].no_answer.exact_match >= moved[0].no_answer.exact_match >= moved[5].no_answer.exact_match
assert moved[-5].has_answer.f1 <= moved[0].has_answer.f1 <= moved[5].has_answer.f1

# %% Exercise 3: the graph's factor is, for the most part, that of its products: two libraries, not two graphs.
import os

head = '<ir_version: 10, opset_import: ["": 17]> product'
product = onnx.parser.parse_model(head + "(float[512, 1024] a) => (float[512, 4096] c) { c = MatMul(a, b) }")
linear = torch.nn.Linear(1024, 4096, bias=False).requires_grad_(False)
product.graph.initializer.append(onnx.numpy_helper.from_array(linear.weight.numpy().T.copy(), "b"))
a = np.random.default_rng(0).standard_normal((512, 1024), dtype=np.float32)
for threads in (1, os.cpu_count()):
    torch.set_num_threads(threads)
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(product.SerializeToString(), options)
    systems = {
        "PyTorch": lambda: linear(torch.from_numpy(a)).numpy(),
        "ONNX Runtime": lambda session=session: session.run(None, {"a": a})[0],
    }
    assert np.allclose(*(run() for run in systems.values()), atol=1e-4)
    work = Work(1, 512, 1, threads=threads)
    print(f"{threads} thread(s)\n{table(compare(*(Candidate(*one, work) for one in systems.items()), rounds=7))}")
torch.set_num_threads(1)
options.intra_op_num_threads = 1
