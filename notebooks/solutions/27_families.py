# Solutions to notebook 27. Run them in the notebook, below its last cell: they use its variables.


# %% Your turn: a column number, or a running count of the real tokens.
def position_rows(is_real, offset, positions_skip_padding, pad):
    if positions_skip_padding:
        return is_real.cumsum(dim=1) * is_real + pad
    return (torch.arange(is_real.shape[1]) + offset).expand(is_real.shape)


# %% Exercise 1: norms first, and with them one more behind the last layer.
for switch in ("norm_first", "norm_embedding", "biases"):
    try:
        print(switch, judge("mBART", flipped(FAMILIES["bart"], switch))[0])
    except ValueError as error:
        print(switch, "is refused:", str(error).split(":")[0])
assert judge("mBART", flipped(FAMILIES["bart"], "norm_first"))[0] < 1e-4

# %% Exercise 2: the bytes are linear in the vocabulary.
for size, kind in (("bart-base", "bart"), ("nllb-200-distilled-600M", "m2m_100")):
    has = FAMILIES[kind].sizes[size]
    width, shape = has["d_model"], (has["d_model"], has["decoder_ffn_dim"], has["decoder_layers"])
    even = gigabytes(*shape, 0) / (4e-9 * width)
    print(f"{size}: above {even:,.0f} tokens; it has {has['vocab_size']:,}")
    assert even < (2 if kind == "bart" else 1) * has["vocab_size"]

# %% Exercise 3: the forced token leads, and what follows differs.
fast, answers = accelerate(models["NLLB"], progress=False), []
for language in (150, 151):
    how = dict(attention_mask=torch.tensor(mask), forced_bos_token_id=language, max_new_tokens=12, do_sample=False)
    theirs, ours = (one.generate(sources["NLLB"], num_beams=1, **how) for one in (models["NLLB"], fast))
    assert torch.equal(theirs, ours) and (ours[:, 1] == language).all()
    answers.append(ours[:, 2:])
assert not torch.equal(*answers)
