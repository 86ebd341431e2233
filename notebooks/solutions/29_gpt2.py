# Solutions to notebook 29. Run them in the notebook, below its last cell: they use its variables.


# %% Your turn: read the prompt once, and give each question a copy, since generate() writes into its cache.
import copy


def answers(model, prompt, questions, new_tokens):
    shared = model(prompt, use_cache=True, logits_to_keep=1).past_key_values
    found = []
    for question in questions:
        ids = torch.cat([prompt, question], dim=1)
        options = {**greedy, "attention_mask": torch.ones_like(ids), "max_new_tokens": new_tokens}
        found.append(model.generate(ids, past_key_values=copy.deepcopy(shared), **options))
    return found


# %% Exercise 1: they are. The first token that was taken back is the next one to go in.
past, new, ids = None, prompt, prompt
for step in range(25):
    if step == 20:
        past.crop(-5)
        before, ids = ids, ids[:, :-5]
        new = ids[:, past.get_seq_length() :]
    found = model(new, past_key_values=past, use_cache=True)
    past, new = found.past_key_values, found.logits[:, -1:].argmax(-1)
    ids = torch.cat([ids, new], dim=1)
assert torch.equal(ids, before) and len(ids.unique()) > 10

# %% Exercise 2: seven texts, if weights and cache are of the same width.
from transformers import GPT2Config, GPT2LMHeadModel

with torch.device("meta"):
    weights = 4 * GPT2LMHeadModel(GPT2Config()).num_parameters()
texts = weights // (1024 * position) + 1
print(f"weights {weights / 1e6:.0f} MB: {texts} texts")
assert texts * 1024 * position > weights >= (texts - 1) * 1024 * position

# %% Exercise 3: logits of all positions grow with the vocabulary, keys and values with layers and width.
from bench.gpt2 import Moved, cached, recomputed

handed = {}
for name, loop in {"all logits": recomputed, "keys and values": cached}.items():
    path = export_gpt2(model, f"{mkdtemp()}/model.onnx", cache=loop is cached)
    moved = Moved()
    written = loop(path, bound=False, moved=moved, threads=1)(prompt.numpy(), 48)
    assert np.array_equal(written, expected[:, 8:].numpy())
    handed[name] = moved.size_bytes
    print(f"{name}: {moved.size_bytes / 1e6:.0f} MB")
assert handed["all logits"] > handed["keys and values"]
