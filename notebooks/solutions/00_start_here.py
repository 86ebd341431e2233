# Solutions to notebook 00. Run them in the notebook, below its last cell: they use its variables.


# %% Your turn: the first call is not timed, and an odd number of others gives a median that was really measured.
def typical_s(run, clock=perf_counter):
    run()
    samples = []
    for _ in range(7):
        begin = clock()
        run()
        samples.append(clock() - begin)
    return median(samples)


# %% Exercise 1: 4 bytes are read and 2 operations a text are done for each weight, however many weights there are.
per_step = weights["decoder"] + weights["head"]
reading_s = 4 * per_step / bytes_per_s
first = next(batch for batch in range(1, 1000) if least_s(per_step, batch) > reading_s)
print(f"arithmetic is the limit from batch {first} on; the rates say above {2 * operations_per_s / bytes_per_s:.1f}")
assert first - 1 <= 2 * operations_per_s / bytes_per_s < first

# %% Exercise 2
from transformers import T5Config

sizes = T5Config(d_model=768, d_ff=3072, num_layers=12, num_heads=12, d_kv=64, vocab_size=32128)
with torch.device("meta"):
    base = T5ForConditionalGeneration(sizes)
named = dict(base.decoder.block.named_parameters())
kept = [w for name, w in named.items() if "EncDecAttention.k" in name or "EncDecAttention.v" in name]
count = sum(w.numel() for w in named.values()) - sum(w.numel() for w in kept) + base.lm_head.weight.numel()
print(f"t5-base: {4 * count / 1e6:.0f} MB a step, at most {1 / least_s(count, 1):.0f} tokens a second")
assert 450e6 < 4 * count < 550e6

# %% Exercise 3: the start token is the same, so the first answer is right, and the second is not.
with torch.no_grad():
    outputs = model.encoder(**source)
    tokens = answer[:, :1]
    while tokens.shape < answer.shape:
        newest = model(decoder_input_ids=tokens[:, -1:], encoder_outputs=outputs, attention_mask=source.attention_mask)
        tokens = torch.cat([tokens, newest.logits[:, -1:].argmax(-1)], dim=1)
assert torch.equal(tokens[:, :2], answer[:, :2])
assert not torch.equal(tokens, answer), "this check cannot fail"

# %% The optional cell, with a folder in place of a name on the hub.
assert translated_by(FOLDER)
