# Solutions to notebook 03. Run them in the notebook, below its last cell: they use its variables.

# %% Your turn: look before the address is taken, and keep the array with the binding, by name.
def bind_safely(binding, name, array):
    if not array.flags.c_contiguous or array.dtype not in (np.float32, np.int64):
        raise ValueError(f"{name} has strides {array.strides} and type {array.dtype}")
    binding.kept = {**getattr(binding, "kept", {}), name: array}
    bind_address(binding, name, array)


# %% Exercise 1: a position has keys and values of 12 heads of width 64 in 12 layers, 4 bytes each; the past comes back
# one longer. (Masks and logits would change nothing: together they are a third of a per cent.)
position = 2 * 12 * 12 * 64 * 4
a_text = (64 + 512 + 65) * position
texts = 495e6 // a_text + 1
print(f"fed, {a_text / 1e6:.0f} MB a text: from {texts:.0f} texts on")
assert texts == 11

# %% Exercise 2: the binding knows an address, and a run reads what lies there now.
token, logits = np.zeros((1, 1, 1), np.int64), np.empty((1, 1, 1, 8000), np.float32)
first_step = {"input_ids": token, "past_mask": np.zeros((1, 1, 0), np.int64), **encode("Where is my bag?")}
first_step |= dict.fromkeys(PAST, np.zeros((1, 1, 8, 0, 32), np.float32))
kept = decoder.io_binding()
for name, array in first_step.items():
    kept.bind_cpu_input(name, array)
kept.bind_output("logits", "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
found = []
for number in (0, 500, 4000):
    token[...] = number
    decoder.run_with_iobinding(kept)
    found.append(logits.copy())
    np.testing.assert_allclose(logits, decoder.run(["logits"], first_step)[0], atol=1e-3)
assert not np.allclose(found[0], found[1], atol=1e-3)

# %% Exercise 3: it holds the second one. A copy of what is to last mends it, or a second buffer.
token[...] = 0
decoder.run_with_iobinding(kept)
result, copied = kept.get_outputs()[0].numpy(), logits.copy()
token[...] = 500
decoder.run_with_iobinding(kept)
assert (result == logits).all() and not (result == copied).all()
np.testing.assert_allclose(copied, found[0], atol=1e-3)
