# Solutions to notebook 30. Run them in the notebook, below its last cell: they use its variables.


# %% Your turn: padded positions count as zero, and each text is divided by its own length.
def mean_of_tokens(states, mask):
    mask = mask[..., None]
    return (states * mask).sum(dim=1) / mask.sum(dim=1)


# %% Exercise 1: an average is a fact about a collection: it helps among texts of the same sort, and harms on others.
def gain(known, asked):
    """Points of recall on some pairs, by the averages of others."""
    moved = questions[asked] - questions[known].mean(axis=0), answers[asked] - answers[known].mean(axis=0)
    return recall(*moved) - recall(questions[asked], answers[asked])


alike, others = gain(slice(0, None, 2), slice(1, None, 2)), gain(slice(0, 100), slice(100, 200))
print(f"by every second pair {alike:+.0f} points on the rest, by the first hundred {others:+.0f} on the last hundred")
assert alike > 0 > others

# %% Exercise 2: where 4 * attention * length is 2 * d_model * (4 * attention + 2 * feed_forward).
equal = 2 * config.d_model * (4 * attention + 2 * feed_forward) / (4 * attention)
print(f"at {equal:.0f} tokens")
assert operations(equal) == 4 * weights * equal

# %% Exercise 3: the scale follows the largest number of a neighbour, wherever it stands, so length is not what counts.
run, lengths = eight["quantize_dynamic"], [len(tokenizer(story).input_ids) for story in stories]
alone = pooled(run, texts[:1])[0]
away = [1 - float(alone @ pooled(run, [texts[0], story])[0]) for story in stories]
worst = int(np.argmax(away))
print(f"story {worst} moves it by {max(away):.6f}; it has {lengths[worst]} tokens, the longest {max(lengths)}")
assert max(away) > moved["quantize_dynamic"] > 0
