# Solutions to notebook 25. Run them in the notebook, below its last cell: they use its variables.


# %% Your turn: a token belongs to the nucleus if those in front of it have less than p together.
def nucleus(probs, p):
    ranked = np.argsort(-probs)
    before = probs[ranked].cumsum() - probs[ranked]
    kept = np.where(before < p, probs[ranked], 0)
    result = np.zeros_like(probs)
    result[ranked] = kept / kept.sum()
    return result


# %% Exercise 1: top-p counts probability, and the tail of a hot distribution has most of it; min-p counts distance.
from transformers import MinPLogitsWarper


def least(probs, p):
    kept = np.where(probs >= p * probs.max(), probs, 0)
    return kept / kept.sum()


some = rng.dirichlet(np.full(40, 0.3))
theirs = MinPLogitsWarper(0.1)(None, torch.from_numpy(np.log(some))[None]).softmax(dim=-1)[0].numpy()
assert np.allclose(least(some, 0.1), theirs)
for options in ({"min_p": 0.1}, {"top_p": 0.9}):
    print(options, answers(temperature=1.5, top_k=0, **options))

# %% Exercise 2: yes. Heated first, more tokens are needed to reach 0.8; cut first, only the cold nucleus is left.
first, last = nucleus(tempered(probs, 2), 0.8), tempered(nucleus(probs, 0.8), 2)
print("temperature, top-p:", first.round(2), " top-p, temperature:", last.round(2))
assert np.count_nonzero(first) > np.count_nonzero(last)

# %% Exercise 3: squared distances grow with the number of draws, the scatter of chi-square does not.
p, q = (TemperatureLogitsWarper(t)(None, logits).softmax(dim=-1)[0].double().numpy() for t in (0.8, 0.85))
p, q, off = p / p.sum(), q / q.sum(), {}
for draws in (200, 2_000, 20_000, 200_000):
    drawn, expected = np.random.default_rng(0).multinomial(draws, q), draws * p
    often = expected >= 5  # as in the notebook: rarer tokens are counted together
    seen, awaited = (np.append(one[often], one[~often].sum()) for one in (drawn, expected))
    off[draws] = (((seen - awaited) ** 2 / awaited).sum() - often.sum()) / np.sqrt(2 * often.sum())
    print(f"{draws} draws: off by {off[draws]:.1f} standard deviations")
assert off[200] < 4 < off[200_000]
