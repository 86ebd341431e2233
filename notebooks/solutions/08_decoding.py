# Solutions to notebook 08. Run them in the notebook, below its last cell: they use its variables.


# %% Your turn: rows of the text are taken in the new order; the cache's method does the same with every key and value.
def follow(written, past, beams, tokens):
    past.reorder_cache(beams)
    return torch.cat([written[beams], tokens[:, None]], dim=1)


# %% Exercise 1
shared = 8 * 512 * 2 * 12 * 12 * 64 * 4  # texts, positions, key and value, layers, heads, width, bytes
copied = 4 * shared
moved = 2 * copied * 64  # read and written in each step
print(f"shared {shared / 1e6:.0f} MB, copied {copied / 1e6:.0f} MB, moved in 64 steps {moved / 1e9:.0f} GB")
assert shared == 301_989_888 and moved > 150e9

# %% Exercise 2: neither says in which order equal scores come, and argpartition does not even sort the others.
some = torch.from_numpy(noise).reshape(4, -1)
flat = some.numpy().ravel()
partitioned = np.argpartition(-flat, 8)[:8]
partitioned = partitioned[np.argsort(-flat[partitioned])]
sorted_all = beam_step(np.zeros(4), some.numpy(), 8)
assert np.array_equal(partitioned, sorted_all[0] * some.shape[1] + sorted_all[1])
assert np.array_equal(partitioned, some.flatten().topk(8).indices.numpy())


# %% Exercise 3: two are enough. If "a" is likely enough to be third only, two beams lose it in the first step.
def best_sentence(odds, k):
    logs, written, scores, ended = np.log(odds + 1e-9), [[0]], np.zeros(1), []
    for _ in range(4):
        chosen = beam_step(scores, logs[[words[-1] for words in written]], 2 * k)
        found = [([*written[b], t], s) for b, t, s in zip(*chosen, strict=True)]
        ended += [(s, words) for words, s in found[:k] if words[-1] == 5]
        still = [(words, s) for words, s in found if words[-1] != 5][:k]
        written, scores = [words for words, _ in still], np.array([s for _, s in still])
    return [WORDS[word] for word in max(ended)[1][1:]]


assert best_sentence(ODDS, 1) == ["the", "cat", "."] and best_sentence(ODDS, 2) == ["a", "cat", "."]
changed = ODDS.copy()
changed[0] = [0, 0.33, 0.32, 0, 0.35, 0]  # a sentence may begin with "dog", which leads nowhere
changed[4] = [0, 0.2, 0.2, 0.2, 0.2, 0.2]
assert best_sentence(changed, 3) == ["a", "cat", "."] != best_sentence(changed, 2)

# %% The optional cell, with a folder in place of a name on the hub.
assert len(four_answers(FOLDER)) == 4
