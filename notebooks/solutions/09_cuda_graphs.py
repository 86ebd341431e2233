# Solutions to notebook 09. Run them in the notebook, below its last cell: they use its variables.


# %% Your turn: the place is a tensor, every size is fixed, and every result is written where it was before.
def static_step(m):
    m.kept.index_copy_(0, m.length, m.new)
    hidden = torch.where(m.places > m.length, -torch.inf, 0.0)
    m.out.copy_(attend(m.new, m.kept, hidden))
    m.length.add_(1)


# %% Exercise 1
from t5accel.models.random_init import random_t5


def operations(layers):
    sizes = dict(d_model=32, d_kv=8, d_ff=64, num_heads=4, num_layers=layers, vocab_size=500)
    backend = TorchStatic(random_t5(sizes).bfloat16())
    memory = backend.new_state(backend.encode(words.numpy(), np.ones(words.shape, dtype=int))).buffers
    return operators(lambda: backend.decoder.advance(memory)).total()


one, two = operations(1), operations(2)
print(f"{two - one} for each layer, {2 * one - two} once")
assert one + 5 * (two - one) == few  # six layers of t5-small, at any width
assert one + 11 * (two - one) == operations(12)  # t5-base's depth


# %% Exercise 2: generate() asks in every step whether a row is unfinished; TorchStatic asks once, for the tokens.
def asked(run):
    return operators(run)["aten._local_scalar_dense"]


longer, shorter = (asked(lambda n=n: model.generate(**source, min_new_tokens=n, max_new_tokens=n)) for n in (21, 1))
state = mini.new_state(mini.encode(**rows))
print(f"in 20 steps: transformers {longer - shorter}, TorchStatic {asked(lambda: mini.run_greedy(state, 20))}")
assert longer - shorter >= 20 and asked(lambda: mini.run_greedy(state, 20)) == 0

# %% Exercise 3
from itertools import combinations

lengths = np.minimum(np.ceil(np.random.default_rng(0).lognormal(3.6, 0.6, 2000)), 256).astype(int)


def wasted(sizes):
    """The share of all places in which no token ever was."""
    places = np.array(sizes)[np.searchsorted(sizes, lengths)]
    return 1 - lengths.sum() / places.sum()


longest = -(-int(lengths.max()) // 8) * 8
best = min(((*pair, longest) for pair in combinations(range(8, longest, 8), 2)), key=wasted)
print(f"64, 128, 256: {wasted((64, 128, 256)):.0%} of the places wasted; {best}: {wasted(best):.0%}")
assert best[0] < 64 and wasted(best) < 0.9 * wasted((64, 128, 256))
