# Solutions to notebook 24. Run them in the notebook, below its last cell: they use its variables.


# %% Your turn: row n - 1 of the logits says what the model writes after n tokens.
def verify(model, source, written, guesses):
    logits = model(**source, decoder_input_ids=torch.tensor([written + guesses])).logits[0]
    choices = logits[len(written) - 1 :].argmax(-1).tolist()  # at each guess, and one after them
    return choices[: agreed(guesses, choices) + 1]


# "agreed" is defined further below in the notebook; here it is again:
def agreed(one, other):
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


# %% Exercise 1: more guesses, fewer calls of the teacher; those of the student are what it costs.
config = student.generation_config
config.num_assistant_tokens_schedule, config.assistant_confidence_threshold, counts = "constant", 0, {}
for guesses in (1, 3, 8):
    config.num_assistant_tokens, streamer = guesses, Sizes()
    found = teacher.generate(**report, assistant_model=student, streamer=streamer, max_new_tokens=96, do_sample=False)
    counts[guesses] = len(streamer.sizes) - 1
    print(f"{guesses} guesses: {counts[guesses]} calls")
    assert torch.equal(found, answer)
assert counts[1] > counts[8]

# %% Exercise 2: one guess yields 1 + alpha tokens in the time 1 + c, so above c = alpha it is best not to guess.
for right in (0.2, 0.5, 0.8):
    assert gain(right, right + 0.01, 1) < 1 < gain(right, right - 0.01, 1)
    assert max(gain(right, right + 0.01, n) for n in range(1, 60)) < 1
    hits = np.random.default_rng(0).random((250_000, 4)) < right
    mean = 1 + np.cumprod(hits, axis=1).sum(axis=1).mean()
    assert abs(mean - gain(right, 0, 4)) < 0.02
    print(f"right {right:.0%}: four guesses yield {mean:.2f} tokens a call, by the formula {gain(right, 0, 4):.2f}")

# %% Exercise 3: counts of a right rule are off by about one standard deviation, by chi-square.
rng, n = np.random.default_rng(0), 20_000
p, q = np.array([0.5, 0.25, 0.15, 0.07, 0.03]), np.array([0.3, 0.3, 0.1, 0.2, 0.1])
missing = np.maximum(p - q, 0) / np.maximum(p - q, 0).sum()
off = {}
for name, probs in (("from what p has more", missing), ("from p", p)):
    guesses, others = rng.choice(5, size=n, p=q), rng.choice(5, size=n, p=probs)
    stays = rng.random(n) * q[guesses] < p[guesses]
    counts = np.bincount(np.where(stays, guesses, others), minlength=5)
    off[name] = (((counts - n * p) ** 2 / (n * p)).sum() - 4) / np.sqrt(8)
    print(f"replacement {name}: off by {off[name]:.1f} standard deviations")
assert off["from what p has more"] < 4 < off["from p"]
