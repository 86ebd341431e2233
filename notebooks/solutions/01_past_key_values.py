# Solutions to notebook 01. Run them in the notebook, below its last cell: they use its variables.

# %% Your turn: only the newest token is fed, the cache is handed over, and the cache that comes back is kept.
def generate_with_cache(source):
    read = {"encoder_outputs": model.encoder(**source), "attention_mask": source.attention_mask}
    tokens, past = torch.tensor([[model.config.decoder_start_token_id]]), None
    while tokens[0, -1] != model.config.eos_token_id:
        outputs = model(decoder_input_ids=tokens[:, -1:], past_key_values=past, use_cache=True, **read)
        past = outputs.past_key_values
        tokens = torch.cat([tokens, outputs.logits[:, -1:].argmax(-1)], dim=1)
    return tokens


# %% Exercise 1
from types import SimpleNamespace

base = SimpleNamespace(num_decoder_layers=12, num_heads=12, d_kv=64)
rows = -(-223_000_000 * 4 // cache_bytes(base, 1, 512, 128))
print(f"t5-base: the cache outweighs the weights from {rows} rows on")
assert rows == 19

# %% Exercise 2: drafts that are checked at once, and forced prefixes, need it.
with torch.no_grad():
    past_one, parts = None, []
    for position in range(4):
        token = before[:, position : position + 1]
        out = small(decoder_input_ids=token, past_key_values=past_one, use_cache=True, **one)
        past_one = out.past_key_values
        parts.append(out.logits)
    whole = small(decoder_input_ids=before[:, :4], **one).logits
torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-3, rtol=1e-3)  # the order of additions differs

# %% Exercise 3: no, in either order: an encoder reads in both directions, so every vector of the context depends on the
# question. A decoder-only model reads left to right and could keep a common beginning.
context = "Ruth bought a lamp in Redton. Omar bought a chair in Holton."
found = EncoderCache(TorchEager(model))
for thing in ("the lamp", "the chair", "the door", "the boat"):
    rows = tokenizer([f"question: Who bought {thing}? context: {context}"], return_tensors="np")
    found.encode(rows["input_ids"], rows["attention_mask"])
assert (found.hits, found.misses) == (0, 4)


def first_vectors(text):
    with torch.no_grad():
        return model.encoder(**tokenizer(text, return_tensors="pt")).last_hidden_state[0, :10]


lamp, chair = (first_vectors(f"context: {context} question: Who bought the {thing}?") for thing in ("lamp", "chair"))
assert not torch.allclose(lamp, chair, atol=1e-3)
