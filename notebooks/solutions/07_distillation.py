# Solutions to notebook 07. Run them in the notebook, below its last cell: they use its variables.


# %% Your turn: positions first, then the softmax; the mean over positions, times T².
def soft_loss(student_logits, teacher_logits, counts, temperature):
    log_q, log_p = ((logits[counts] / temperature).log_softmax(-1) for logits in (student_logits, teacher_logits))
    return temperature**2 * F.kl_div(log_q, log_p, log_target=True, reduction="batchmean")


# %% Exercise 1: the larger the model, the smaller the head's share, and the nearer to four.
def weights_read(vocabulary, d_model, inner, d_ff, layers):
    # q, k, v, o of self-attention, q and o of cross-attention (k and v are made once), wi and wo, three norms
    return vocabulary * d_model + layers * (6 * d_model * inner + 2 * d_model * d_ff + 3 * d_model)


by_count = weights_read(8000, 256, 256, 1024, 4) / weights_read(8000, 256, 256, 1024, 2)
assert abs(by_count - counted[2]) < 0.01
sizes = {"t5-small": (512, 512, 2048, 6, 1), "t5-base": (768, 768, 3072, 12, 3), "t5-large": (1024, 1024, 4096, 24, 6)}
fewer = {}
for name, (d_model, inner, d_ff, layers, kept) in sizes.items():
    fewer[name] = weights_read(32128, d_model, inner, d_ff, layers) / weights_read(32128, d_model, inner, d_ff, kept)
print(f"mini, two layers: {by_count:.2f} times fewer;", {name: f"{ratio:.2f}" for name, ratio in fewer.items()})
assert fewer["t5-small"] < fewer["t5-base"] < fewer["t5-large"] < 4


# %% Exercise 2: cold, a teacher says no more than a label, its own. Hot, T² · KL is half the mean squared difference of
# the logits, each list centred on 0: all words count alike.
def scaled_divergence(temperature):
    log_p, log_q = ((z.double() / temperature).log_softmax(-1) for z in (z_teacher, z_student))
    return temperature**2 * (log_p.exp() * (log_p - log_q)).sum()


cold = (z_teacher.double() / 0.05).softmax(-1)
assert cold.max() > 0.99 and cold.argmax() == z_teacher.argmax()
limit = 0.5 * ((z_teacher - z_teacher.mean()) - (z_student - z_student.mean())).double().square().mean()
for temperature in (1, 2, 10, 100, 1000):
    print(f"T = {temperature:4}: T² · KL = {scaled_divergence(temperature):.4f}; the limit {limit:.4f}")
assert abs(scaled_divergence(1000) - limit) < 0.02 * limit

# %% Exercise 3
without = {}
for missing in range(4):
    without[missing] = mean_loss(student_of(teacher, [layer for layer in range(4) if layer != missing]))
print("without layer:", {missing: f"{loss:.2f}" for missing, loss in without.items()})
assert min(without.values()) > mean_loss(teacher)  # every layer is used
assert max(without.values()) > 1.5 * min(without.values())
