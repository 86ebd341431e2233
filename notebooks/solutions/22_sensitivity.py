# Solutions to notebook 22. Run them in the notebook, below its last cell: they use its variables.


# %% Your turn: what is added has no gradient, so the weight's own gradient is all that is left.
def straight_through(weight, bits):
    top = 2 ** (bits - 1) - 1
    plain = weight.detach()
    scale = plain.abs().amax(dim=1, keepdim=True).clamp(min=1e-9) / top
    return weight + ((plain / scale).round().clamp(-top, top) * scale - plain)


# %% Exercise 1: for its size the embedding costs little. By bytes one begins with small matrices.
sizes = {name: model.get_submodule(name).weight.numel() for name in matrices}
per_weight = sorted(matrices, key=lambda name: -cost[name] / sizes[name])
print("the most sensitive for its size:", per_weight[0], "- place of the embedding:", per_weight.index("shared") + 1)
assert per_weight[0] != "shared"


def cost_at(names, megabytes):
    """The cost with the first of these matrices in 8 bits, as many as fit, and all others in 4."""
    chosen, room = [], 1e6 * megabytes - sum(sizes.values()) / 2
    for name in names:
        if sizes[name] / 2 <= room:
            chosen.append(name)
            room -= sizes[name] / 2
    with rounded(model, chosen, 8), rounded(model, [name for name in matrices if name not in chosen], 4):
        return divergence()


for megabytes in (7.5, 8.5, 9.5):
    by_cost, by_byte = cost_at(order, megabytes), cost_at(per_weight, megabytes)
    print(f"{megabytes} MB: by cost {by_cost:.3f}, by cost for each byte {by_byte:.3f}")
    assert by_byte < by_cost

# %% Exercise 2: rows with very different maxima must share one scale; the costs grow most where rows differ most.
everything = {}
for name in matrices:
    weight = model.get_submodule(name).weight
    scale = float(weight.detach().abs().max()) / 7
    kept, weight.data = weight.data, (weight.detach() / scale).round() * scale
    everything[name] = divergence()
    weight.data = kept
worse = sorted(linear[:-1], key=lambda name: cost[name] / everything[name])
for name in worse[:3]:
    print(f"{name}: {cost[name]:.4f} with a scale for each row, {everything[name]:.4f} with one")
print(f"added up: {sum(cost.values()):.3f} and {sum(everything.values()):.3f}")
assert sum(everything.values()) > 2 * sum(cost.values())

# %% Exercise 3: hardly ever, so that the lost bit costs more than saturation does. 2 * 255 * 127 does not fit in 16
# bits, 2 * 255 * 64 does.
weight = model.decoder.block[0].layer[2].DenseReluDense.wo.weight.detach().numpy()
x = np.maximum(np.random.default_rng(0).normal(size=(16, weight.shape[1])), 0)
integers, off = np.rint(x / x.max() * 255), {}
for top in (127, 64):
    scales = np.abs(weight).max(axis=1, keepdims=True) / top
    pairs = (integers[:, None] * np.rint(weight / scales)).reshape(16, len(weight), -1, 2).sum(axis=-1)
    saturated = np.mean(np.abs(pairs) > 2**15 - 1)
    found = pairs.clip(-(2**15), 2**15 - 1).sum(axis=-1) * scales[:, 0] * x.max() / 255
    off[top] = np.abs(found - x @ weight.T).mean() / np.abs(x @ weight.T).mean()
    print(f"integers to {top}: {saturated:.4%} of the pairs saturate, the result is off by {off[top]:.2%}")
assert off[127] < off[64]
