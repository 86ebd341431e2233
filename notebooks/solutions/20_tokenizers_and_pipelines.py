# Solutions to notebook 20. Run them in the notebook, below its last cell: they use its variables.


# %% Your turn: from the longest text on, so that the first row of a group is its longest.
def by_length(lengths, budget):
    groups = []
    for place in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if groups and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= budget:
            groups[-1].append(place)
        else:
            groups.append([place])
    return groups


# %% Exercise 1: a fresh process, for the library reads the variable once; on two cores it is worth little.
import os
import subprocess

PROGRAM = """
import sys, time
from tokenizers import Tokenizer
rust, texts = Tokenizer.from_file(sys.argv[1]), sys.stdin.read().splitlines() * 5
rust.encode_batch(texts)
start = time.perf_counter()
rust.encode_batch(texts)
print(time.perf_counter() - start)
"""
command = [sys.executable, "-c", PROGRAM, str(FOLDER / "tokenizer.json")]
for parallel in ("true", "false"):
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": parallel}
    given = "\n".join(everything)
    said = subprocess.run(command, env=environment, input=given, capture_output=True, encoding="utf-8", check=True)
    print(f"TOKENIZERS_PARALLELISM={parallel}: {1e3 * float(said.stdout):.0f} ms")

# %% Exercise 2: a tenth of the whole is a ninth of the model's time.
around_s = (rows[0]["before"] + rows[0]["after"]) / 1e3
rate = 24 / (9 * around_s)
assert abs(around_s / (around_s + 24 / rate) - 0.1) < 1e-9
print(f"from {rate:,.0f} tokens a second on")

# %% Exercise 3: small budgets have less padding and more batches, whose steps each read all weights.
every, seen = [len(ids) for ids in expected], []
for budget in (256, 1024, 8192):
    groups = by_length(every, budget)
    padded = sum(len(group) * max(every[i] for i in group) for group in groups)
    seen.append((len(groups), padded))
    print(f"budget {budget:5,}: {len(groups):3} batches, {1 - sum(every) / padded:.1%} padding")
assert seen[0][0] > seen[1][0] > seen[2][0] and seen[0][1] < seen[1][1] < seen[2][1]
