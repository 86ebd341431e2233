import nbformat, re, sys
from pathlib import Path
ROOT=Path('study')
cells=[]
def md(text, **meta): cells.append(nbformat.v4.new_markdown_cell(text.strip('\n'), metadata=meta))
def code(text): cells.append(nbformat.v4.new_code_cell(text.strip('\n')))
def solution(n, text): md(f"<details><summary>Solution {n}</summary>\n\n```python\n{text.strip(chr(10))}\n```\n\n</details>", tags=["solution"])

md('''
# 13 · Encoders alone, decoders alone: a BERT that answers, a GPT-2 that writes

Two of the posts that this course re-tests are not about T5. *A guide to optimizing Transformer-based models for faster inference* ([Tryolabs, 2022](https://tryolabs.com/blog/2022/11/24/transformer-based-model-for-faster-inference)) takes a **BERT** that answers questions, prunes it, exports it, fuses it, narrows it to fp16, and finds 7.73x. *What we learned by accelerating by 5X Hugging Face generative language models* ([Lefebvre Sarrut, 2022](https://ai.lefebvre-sarrut.eu/2022/02/09/what-we-learned-by-accelerating-by-5x-hugging-face-generative-language-models/)) takes a **GPT-2** and finds ONNX Runtime slower than PyTorch, until the tensors stay where they are; and a cache that brings nothing. An encoder-decoder is both of them in one. Here each half is alone, with the tools that most readers will use for it: optimum, and ONNX Runtime's own optimiser.
''')
cells.append(nbformat.v4.new_code_cell((ROOT/'scripts/bootstrap_cell.py').read_text().strip('\n')))
md('''
## The question

Our reader is a BERT of four layers, trained on generated stories. For each token of the text it gives two scores: how good a *beginning* of the answer it is, and how good an *end*. It was taught to abstain as SQuAD 2.0 asks ([Rajpurkar, Jia and Liang, 2018](https://arxiv.org/abs/1806.03822)): the first token, `[CLS]`, stands for "the text does not say". In transformers' own words:
''')
code('''
import torch

from t5accel.study import bert


reader, tokenizer = bert.load_bert("mini-bert")
text = "In Tillbury, Carla bought a lamp. Ivan bought a kettle in Norbury. The lamp was red."
for question in ("Where did Ivan buy the kettle?", "What did Carla buy?", "Where did Ivan buy the lamp?"):
    inputs = tokenizer(question, text, return_tensors="pt")
    with torch.inference_mode():
        scores = reader(**inputs)
    first, last = int(scores.start_logits.argmax()), int(scores.end_logits.argmax())
    print(f"{question:32}", tokenizer.decode(inputs.input_ids[0, first : last + 1]))
''')
md('''
An arg-max of each may end before it begins. `answerer` looks for the best *pair*, within the text and not too long, and abstains where `[CLS]` scores higher than that pair by more than a threshold, which was chosen on stories of its own. Scored on the course's 200 questions (*seen* are unseen stories of templates that training drew from):
''')
code('''
from t5accel import quality
from t5accel.study import spans

answer = spans.answerer(tokenizer, spans.torch_run(reader), threshold=bert.threshold_of(reader))
print(answer([f"question: Where did Ivan buy the lamp? context: {text}"]))
print(quality.evaluate(answer, names=["questions"]))
''')
md('''
What can be made faster here, and by how much?

## The prediction

There is no loop: one call reads all tokens at once, and every weight is used once for each of them. So it is *operations* that count, not bytes (notebook 05). A pruned copy of the reader is bundled, too: trained on while heads and neurons were masked by **movement** ([Sanh, Wolf and Rush, 2020](https://arxiv.org/abs/2005.07683)), then without them. Multiplications of a call, whole and pruned:
''')
code('''
pruned, _ = bert.load_bert("mini-bert-pruned")


def products(model, tokens, width=128, size=32):
    """Multiplications of one text: the four products of attention, its scores and mixtures, two feed-forward ones."""
    layers = zip(*bert.widths(model).values(), strict=True)
    return sum(tokens * (4 * width * h * size + 2 * tokens * h * size + 2 * width * n) for h, n in layers)


''')
code('''
whole, less = (products(model, 512) for model in (reader, pruned))
print(bert.widths(pruned))
print(f"512 tokens: {whole / 1e6:.0f} and {less / 1e6:.0f} million: at best {whole / less:.2f}x")
''')
md('''
- **Pruning**: the ratio above, if the products rule.
- **A graph, and fused operators**: they save nodes, not products: little. The post says 1.18x and 1.04x.
- **8 bits**: this CPU multiplies integers four at a time; but rounding activations takes time as well. Between 1x and 4x.
- **Memory that stays** (IOBinding): nothing. Inputs are a few kilobytes, and a CPU copies nothing in either case. (The post's "nearly constant" time is a GPU's.)

## The code

optimum does it in one line, where it is installed: `ORTModelForQuestionAnswering.from_pretrained(folder, export=True)`. Our own way is one file (`t5accel/study/bert_graphs.py`): trace the model, then let ONNX Runtime's optimiser for BERTs look for what it knows.
''')
code('''
from t5accel.study import bert_graphs

from pathlib import Path
from tempfile import TemporaryDirectory


scratch = TemporaryDirectory()
folder = Path(scratch.name)
graph = bert_graphs.export_bert(reader, folder / "plain.onnx")
print(bert_graphs.fuse_bert(graph, folder / "fused.onnx"))
''')
code('''
import onnx

for name in ("plain", "fused"):
    nodes = onnx.load(folder / f"{name}.onnx").graph.node
    print(f"{name:6} {len(nodes):4} nodes, {len({node.op_type for node in nodes})} operators")
''')
md('''
Every layer has become one attention, one product with its bias and GELU, and two norms with their residuals. Since the number of heads is read off the graph, layers of unequal width are fused as well.

`Readers` keeps both models and makes each graph when it is first asked for; for *static* int8 it takes the ranges of activations from a few examples. `RUNGS` is the ladder.
''')
code('''
from t5accel.study import bert_ladder

from t5accel import machine

examples = [bert_ladder.random_inputs(reader.config.vocab_size, 4, 64, seed=seed) for seed in range(4)]
readers = bert_ladder.Readers({"whole": reader, "pruned": pruned}, folder, examples, machine.cpu_threads())
for rung in bert_ladder.RUNGS:
    print(f"{rung.name:20} {rung.adds}")
''')
md('''
## Equal first

`speed_rows` compares each rung's logits with PyTorch's before anything is timed: those in fp32 and of the same weights have to be equal within rounding. Can that check fail? Here is a reader that forgets which tokens are the question's:
''')
code('''
import numpy as np


given, run = bert_ladder.random_inputs(reader.config.vocab_size, 2, 64), spans.torch_run(reader)
forgetful = {**given, "token_type_ids": 0 * given["token_type_ids"]}
try:
    quality.parity(np.stack(run(forgetful)), np.stack(run(given)), atol=2e-3)
    raise SystemExit("the check has let a wrong reader pass")
except quality.ParityError as error:
    print("caught:", str(error).split(":")[0])
''')
md('''
## The measurement

One text of 512 tokens, all rungs interleaved; then the scores of each. A rung that fails says so (optimum is not for transformers 5).
''')
code('''
rungs, whose = bert_ladder.RUNGS, dict(model="mini-bert", keep_going=True)
speed = bert_ladder.speed_rows(rungs, readers, batch=1, tokens=512, rounds=7, **whose)
thresholds = {"whole": bert.threshold_of(reader), "pruned": bert.threshold_of(pruned)}
scored = bert_ladder.quality_rows(rungs, readers, tokenizer, thresholds, **whose)
''')
code('''
print(f"{'rung':20} {'ms':>6} {'ratio':>6} {'factor':>7} {'MB':>5} {'F1':>6} {'EM':>6} {'abstains right':>15}")
for fast, good in zip(speed, scored, strict=True):
    if "failed" in fast or "failed" in good:
        print(f"{fast['rung']:20} {(fast.get('failed') or good['failed'])[:70]}")
        continue
    cells = (np.median(fast["latency_s"]) * 1e3, fast["ratio"], fast.get("factor", 1), fast["size_bytes"] / 1e6,
             good["f1"], good["exact_match"], good["exact_match_no_answer"])
    print(f"{fast['rung']:20} {{:6.1f}} {{:6.2f}} {{:7.2f}} {{:5.1f}} {{:6.1f}} {{:6.1f}} {{:15.1f}}".format(*cells))
''')
md('''
`factor` is the time of the rung below over its own; `ratio` is against PyTorch. The whole road and the steps beside it, drawn; orange rungs lose more than one point of F1:
''')
code('''
import io

from IPython.display import Image

from t5accel.lab.draw import plot_ladders

good = {row["rung"]: row.get("inside") for row in scored}
shown = [{**row, "cell": "mini-bert", "inside": good[row["rung"]]} for row in speed if "failed" not in row]
picture = io.BytesIO()
plot_ladders({"one text of 512 tokens": shown}).savefig(picture, format="png", dpi=66)
Image(picture.getvalue())
''')
md('''
## BERT large

The post's model has 24 layers. Its size with random weights shows how fast the same ladder is there: the pruned rungs keep the same shares of heads and neurons. A recorded run, since it takes gigabytes and minutes:
''')
code('''
from t5accel.lab.rows import described, recorded

record = recorded("bert.json")
print(described(record))
for row in record["rows"]:
    if row["model"] == "random:bert-large" and "latency_s" in row:
        ms, mb = np.median(row["latency_s"]) * 1e3, row["size_bytes"] / 1e6
        print(f"{row['batch']} text(s)  {row['rung']:20} {ms:8.0f} ms  {row['ratio']:.2f}x  {mb:5.0f} MB")
''')
md('''
**Blocks.** The post's pruned model comes from *nn_pruning* (Lagunas et al., 2021, [*Block Pruning For Faster Transformers*](https://arxiv.org/abs/2109.04838)). Its version 0.1.2 still installs, but what trains no longer imports on Python 3.11 and transformers 4.57 (a mutable default in a dataclass; `transformers.optimization.AdamW` is gone), so we wrote movement anew (`bert_pruning.py`): a mask for each head, neuron or block. Squares of attention's matrices go one by one, and only where they make up a whole head can anything be removed:
''')
code('''
from t5accel.study import bert_pruning


masked, _ = bert.load_bert("mini-bert")
half = bert_pruning.Pruning(blocks=0.5)
masks = bert_pruning.attach(masked, half)
masked(**{name: torch.from_numpy(array) for name, array in given.items()}).start_logits.square().mean().backward()
bert_pruning.close(masks, half, 1.0)
small = bert_pruning.removed(masked)
zeros = bert_pruning.zero_share(small)
print(bert.widths(small)["heads"], f"heads left; of what is left of the layers' matrices {zeros:.0%} are zeros")
''')
md('''
Zeros cost a dense product as much as other numbers do. What pays is what can be cut out whole.

## GPT-2: count the bytes first

A decoder alone writes one token per call. The post's graph has no cache: it computes all positions anew and *gives logits for all of them*, of which only the last row is looked at. What does that add up to, for GPT-2's vocabulary of 50,257 and 256 tokens?
''')
code('''
from t5accel.study import gpt2


every, looked_at = gpt2.bytes_of_logits(1, 256), 256 * 50257 * 4
print(f"{every / 1e9:.1f} GB of logits; those of the rows that are looked at: {looked_at / 1e6:.0f} MB")
''')
md('''
That is the post's "6 GB". On a GPU they cross a bus; on a CPU a pointer changes hands, so we predict: **numpy or IOBinding makes no difference here, the needless logits do** (a product with 50,257 columns for every position), and a cache wins more the longer the text. A GPT-2 with its own vocabulary and positions, but four narrow layers, so that this runs in seconds; every way has to write transformers' tokens before it is timed:
''')
code('''
from t5accel.study import gpt2_ways


model = gpt2.random_gpt2(dict(n_embd=256, n_layer=4, n_head=8))
narrow = gpt2_ways.Gpt2(model, folder / "gpt2", machine.cpu_threads())
rows = {n: gpt2_ways.gpt2_rows(narrow, model="narrow", new_tokens=n, rounds=3, keep_going=True) for n in (16, 64)}
''')
code('''
print(f"{'':44} {'16 tokens':>10} {'64 tokens':>10} {'handed over':>12}")
for short, long in zip(*rows.values(), strict=True):
    ms = (f"{np.median(row['latency_s']) * 1e3:7.0f} ms" if "latency_s" in row else "failed" for row in (short, long))
    moved = f"{long['moved_bytes'] / 1e6:9.1f} MB" if "moved_bytes" in long else ""
    print(f"{long['system']:44} {next(ms):>10} {next(ms):>10} {moved:>12}")
''')
code('''
import matplotlib.pyplot as plt

record = recorded("gpt2.json")
print(described(record))
found = record["rows"] or [row for part in rows.values() for row in part]
figure, axes = plt.subplots(figsize=(8, 3.4), layout="constrained")
for way in gpt2_ways.WAYS:
    own = [row for row in found if row["system"] == way and "latency_s" in row]
    lengths = [row["new_tokens"] for row in own]
    axes.plot(lengths, [np.median(row["latency_s"]) / row["new_tokens"] * 1e3 for row in own], "o-", label=way)
axes.set(xlabel="new tokens", ylabel="ms per token", xscale="log", yscale="log", title=found[0]["model"])
axes.spines[["top", "right"]].set_visible(False)
axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()
''')
md('''
## At what cost? GPU or CPU?

The post asks it and does not say. Divide: tokens per second of one core, and what an hour of it costs. **The price is an assumption**, a round number to be replaced by that of your own bill; the last column says how many times as fast as one of these cores a GPU at another assumed price would have to be to cost as little per token.
''')
code('''
PRICES = {"a core": 0.04, "a GPU": 2.00}  # dollars an hour: assumed, put yours
timed = {row["system"]: row for row in rows[64] if "latency_s" in row}
timed |= {f"reader, {row['rung']}": row for row in speed if row["rung"] in ("PyTorch", "bound")}
print(f"{'':44} {'tokens/s per core':>18} {'dollars per million':>20} {'a GPU pays from':>16}")
for name, row in timed.items():
    per_core = row["tokens_per_s"] / machine.cpu_threads()
    dollars = PRICES["a core"] / 3600 / per_core * 1e6
    print(f"{name:44} {per_core:18,.0f} {dollars:20.4f} {PRICES['a GPU'] / PRICES['a core']:15.0f}x")
''')
md('''
## The verdicts
''')
code('''
for row in recorded("claims.json")["rows"]:
    if row["id"][:3] in ("C15", "C16"):
        print(f"{row['id']}  {row['claim']}\\n      {row['verdict']}: {row['measured'] or row['why']}\\n")
''')
md('''
## What surprised us

SURPRISES

Of the sources that the two posts name, we could not try the pruned and the whole BERT large (no model hub is within reach here), nor the demo, whose links the text that we have does not hold; nn_pruning is above.

## Exercises

1. `products` says what pruning can bring at 512 tokens. At which length is half of the reader's multiplications attention's scores and mixtures, which grow with the square of the length?
2. The threshold was chosen on stories. Move it by 5 in both directions, and see what F1 and right abstentions do.
3. A GPT-2 that gives the last logits alone: count what it hands over for 256 tokens, and check that it writes the same.
''')
solution(1,'''
from t5accel.study.bert import load_bert, widths

heads, neurons = (sum(sizes) for sizes in widths(load_bert("mini-bert")[0]).values())
linear = 4 * 128 * heads * 32 + 2 * 128 * neurons  # for each token; and for each pair of tokens:
pairs = 2 * heads * 32
tokens = linear // pairs
assert tokens * pairs <= linear < (tokens + 1) * pairs
print(f"from {tokens} tokens on")
''')
solution(2,'''
from t5accel import quality
from t5accel.study.bert import load_bert, threshold_of
from t5accel.study.spans import answerer, torch_run

model, tokenizer = load_bert("mini-bert")
found = {}
for by in (-5, 0, 5):
    answer = answerer(tokenizer, torch_run(model), threshold=threshold_of(model) + by)
    found[by] = quality.evaluate(answer, names=["questions"]).questions
    print(by, f"F1 {found[by].all.f1:.1f}, abstains right {found[by].no_answer.exact_match:.1f}")
assert found[-5].no_answer.exact_match >= found[0].no_answer.exact_match >= found[5].no_answer.exact_match
assert found[-5].has_answer.f1 <= found[0].has_answer.f1 <= found[5].has_answer.f1
''')
solution(3,'''
from tempfile import TemporaryDirectory

import numpy as np

from t5accel.study.gpt2 import Moved, export_gpt2, random_gpt2, recomputed, torch_greedy

model = random_gpt2(dict(vocab_size=300, n_embd=64, n_layer=2, n_head=4))
prompts, moved = np.array([[5, 6, 7]]), Moved()
with TemporaryDirectory() as folder:
    path = export_gpt2(model, f"{folder}/last.onnx", cache=False, last_logits=True)
    tokens = recomputed(path, bound=False, moved=moved, last_logits=True)(prompts, 256)
assert (tokens == torch_greedy(model)(prompts, 256)).all() and len(np.unique(tokens)) > 5
ids = sum(8 * length for length in range(3, 259))
assert moved.size_bytes == ids + 256 * 300 * 4
''')
nb=nbformat.v4.new_notebook(cells=cells)
for i,c in enumerate(nb.cells): c['id']=f'cell-{i:02}'
nb.metadata={'kernelspec': {'display_name': 'Python 3', 'language': 'python', 'name': 'python3'}, 'language_info': {'codemirror_mode': {'name': 'ipython', 'version': 3}, 'file_extension': '.py', 'mimetype': 'text/x-python', 'name': 'python', 'nbconvert_exporter': 'python', 'pygments_lexer': 'ipython3', 'version': '3.11.7'}}
nbformat.write(nb, sys.argv[1])
