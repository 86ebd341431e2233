# Solutions to notebook 11. Run them in the notebook, below its last cell: they use its variables.

# %% Your turn: a request takes the place that is free first, but not before it comes.
def in_flight(requests, places=3):
    free, found = [0] * places, []
    for came, wants in requests:
        place = free.index(min(free))
        first = max(came, free[place])
        free[place] = first + wants
        found.append((first, free[place]))
    return found


# %% Exercise 1: it holds exactly, since a request has its row for as many steps as it wants tokens.
rows_in_use = np.mean([len(step) for step in flying.steps])
requests_a_step = len(requests) / len(flying.steps)
steps_with_a_row = np.mean([end - first for _, first, end, _ in flying.spans])
print(f"{rows_in_use:.2f} rows = {requests_a_step:.2f} requests a step x {steps_with_a_row:.2f} steps")
np.testing.assert_allclose(rows_in_use, requests_a_step * steps_with_a_row)
assert [end - first for _, first, end, _ in flying.spans] == [new for _, new in requests]


# %% Exercise 2
def corrected(latencies, interval):
    missing = [np.arange(latency - interval, 0, -interval) for latency in latencies if latency > interval]
    return np.concatenate([latencies, *missing])


seen = np.array([0.01] * 300 + [1.0] * 2)
better = corrected(seen, 1 / 15)
late = [sum(some > 0.2 - 1e-9) for some in (seen, better)]  # one of them is 3/15 s, rounded up or down
print(f"0.2 s or longer: {late[0]} of {len(seen)}; corrected {late[1]} of {len(better)}")
assert late == [2, 26]  # an open loop at 30 a second: about 24

# %% Exercise 3: the fast queue is the slow one on a clock that runs five times as fast. So the ratio under one limit L
# is 5 times (the slow server's rate under 5 L over its rate under L): 5 or more, and without bound where the slow
# server's rate under L is next to nothing.
slow = {SHORT: 0.05, LONG: 0.9}
quick = {new: seconds / 5 for new, seconds in slow.items()}
for rate in (0.5, 2, 4, 6):
    np.testing.assert_allclose(p99(5 * rate, quick), p99(rate, slow) / 5)
highest_rate = {limit: rates[[p99(rate, slow) <= limit for rate in rates]].max(initial=0) for limit in (1, 5)}
ratio = 5 * highest_rate[5] / highest_rate[1]
print(f"under 1 s the ratio is {ratio:.0f}, not 5")
assert ratio > 10
