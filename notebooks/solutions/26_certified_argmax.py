# Solutions to notebook 26. Run them in the notebook, below its last cell: they use its variables.


# %% Your turn: w·h - v·g = (w - v)·h + v·(h - g), and each product is at most the product of the lengths.
def bounds(row_errors, copy_norms, h, g):
    return row_errors * np.linalg.norm(h) + copy_norms * np.linalg.norm(h - g)


# %% Exercise 1: the layers grow with the square of the width and with their number, the head with the width alone.
for name, head_m, layers_m in (("t5-small", 16.4, 22.0), ("t5-base", 32_128 * 768 / 1e6, 99.1)):
    share = head_m / (head_m + layers_m)
    print(f"{name}: the head is {share:.0%} of the bytes, at most {1 / (1 - 0.75 * share):.2f} times as fast")
assert share < 0.25


# %% Exercise 2: far fewer, for a block's largest weight is smaller than the row's. A scale costs one bit for a weight.
by_row = rounded(rows, 4)
by_block = rounded(rows.reshape(-1, 32), 4).reshape(rows.shape)
for name, some in (("a scale for each row", by_row), ("for each 32 weights", by_block)):
    approximate, lengths = hidden @ some.T, np.linalg.norm(rows - some, axis=1)
    reach = lengths * np.linalg.norm(hidden, axis=1, keepdims=True)
    count = (approximate + reach >= (approximate - reach).max(axis=1, keepdims=True)).sum(axis=1)
    print(f"{name}: {np.median(count):.0f} candidates in the median step, {count.mean():.0f} in the mean")
assert count.mean() < found[4].mean() / 2

# %% Exercise 3: the first of both, as np.argmax; no sum of floats can prove it, so it returns None and all is computed.
twins = rows.copy()
likeliest = int(tokens[0])
other = likeliest + 1 if likeliest + 1 < len(rows) else likeliest - 1
twins[other] = twins[likeliest]
copied = rounded(twins, 7)
h = hidden[:1]
length = np.linalg.norm(h, axis=1)
answer = certify_argmax(
    output_head(twins, copied), ApproxLogits((h @ copied.T).astype(np.float32), h, length, 0 * length)
)
print("two equal rows:", answer)
assert answer is None
