# Solutions to notebook 32. Run them in the notebook, below its last cell: they use its variables.


# %% Your turn: all pairs or none; the ends are enough.
def judge(ratios, claimed):
    if min(ratios) >= 0.9 * claimed:
        return "holds"
    return "undecided" if max(ratios) >= 0.9 * claimed else "refuted"


# %% Exercise 1: the naive loop slows down with the length: the cache brings more, equal factors are less of the whole.
share, factor = {}, {}
for tokens in (64, 256):
    rows = ladders[f"random:t5-small, {tokens} forced tokens"]
    steps = way_to(rows, fastest(rows)["rung"])[1:]
    factor[tokens] = {row["adds"]: row["factor"] for row in steps}
    share[tokens] = {row["adds"]: log(row["factor"]) / sum(log(one["factor"]) for one in steps) for row in steps}
for adds in share[64]:
    print(
        f"{adds}: {share[64][adds]:.0%} and {share[256][adds]:.0%}, {factor[64][adds]:.2f} and {factor[256][adds]:.2f}"
    )
grown = {adds: share[256][adds] - share[64][adds] for adds in share[64]}
assert max(grown, key=grown.get) == "a cache of keys and values"
assert share[256]["8 bits"] < share[64]["8 bits"] and 0.9 < factor[256]["8 bits"] / factor[64]["8 bits"] < 1.2

# %% Exercise 2: a bound of nine tenths, divided by 0.9, is the number that was claimed.
changed = [
    row for row in load_results("claims.json")["rows"]
    if row["verdict"] == "holds"
    and any("low" in one and one["low"] < one["least"] / 0.9 for one in row["figures"] if "least" in one)
]  # fmt: skip
for row in changed:
    print(row["claim"])
assert any(row["claim"].startswith("Encoder and head") for row in changed)


# %% Exercise 3: the scatter of the two ends moves the answer by many tokens, in either direction.
def crossing(first, second, wanted=10):
    (short, low), (long, high) = first, second
    return long + (wanted - high) * (long - short) / (high - low)


(short, low), (long, high) = sorted(pairs.items())[-2:]
lengths = [crossing((short, pick(low)), (long, pick(high))) for pick in (min, median, max)]
print("ten times at", [round(one) for one in lengths], "tokens: slowest pairs, medians, fastest pairs")
assert lengths[0] > lengths[1] > lengths[2]
