# Solutions to notebook 23. Run them in the notebook, below its last cell: they use its variables.


# %% Your turn: a neuron is a row of wi and the column of wo with its number.
def without_neurons(wi, wo, kept):
    small_wi = torch.nn.Linear(wi.in_features, len(kept), bias=False)
    small_wo = torch.nn.Linear(len(kept), wo.out_features, bias=False)
    small_wi.weight.data = wi.weight.data[kept].clone()
    small_wo.weight.data = wo.weight.data[:, kept].clone()
    return small_wi, small_wo


# %% Exercise 1: heads stand in for each other. Each of two may be dispensable, and not both.
def loss_without(heads):
    """What masking these heads costs; `heads` maps the name of an attention to numbers of heads."""
    kept = {name: model.get_submodule(name).o.weight.data for name in heads}
    for name, numbers in heads.items():
        mask = torch.ones(8).index_fill(0, torch.tensor(numbers), 0).repeat_interleave(32)
        model.get_submodule(name).o.weight.data = kept[name] * mask
    found = nats(model) - loss["whole"]
    for name, weight in kept.items():
        model.get_submodule(name).o.weight.data = weight
    return found


attentions = [name for name in magnitudes if name.startswith("decoder") and name.endswith("Attention")]
each = {name: [loss_without({name: [head]}) for head in range(8)] for name in attentions}
cheaper = {name: sorted(range(8), key=costs.__getitem__)[:4] for name, costs in each.items()}
added = sum(each[name][head] for name, heads in cheaper.items() for head in heads)
at_once = loss_without(cheaper)
print(f"the cheaper half of the decoder's heads: {added:.2f} nats one by one, {at_once:.2f} all at once")
assert at_once > 2 * added

# %% Exercise 2: the same function, for 16 is a power of two, and other norms: magnitude now keeps what it liked least.
rescaled = copy.deepcopy(model)
for name in [one for one in magnitudes if one.endswith("Attention")]:
    module = rescaled.get_submodule(name)
    rows = (magnitudes[name].argsort()[:4, None] * 32 + torch.arange(32)).flatten()
    module.v.weight.data[rows] *= 16
    module.o.weight.data[:, rows] /= 16
assert torch.equal(run(rescaled).logits, run(model).logits)
norms = magnitude(rescaled)
fooled = {name: tuple(sorted(norms[name].argsort()[4:].tolist())) for name in norms if name.endswith("Attention")}
same = sum(len({*fooled[name]} & {*halves[name]}) for name in fooled) / sum(map(len, fooled.values()))
print(f"it keeps {same:.0%} of the heads that it kept before: {nats(prune_to(rescaled, halves | fooled)):.2f} nats")
assert same < 0.5

# %% Exercise 3: zip finds the zeros, so a download is shorter; in memory, where time is spent, they are all back.
import io
import zipfile

zipped = {}
for share in (0, 0.5, 0.9):
    matrix = torch.nn.Linear(512, 512, bias=False)
    if share:
        prune.remove(prune.l1_unstructured(matrix, "weight", amount=share), "weight")
    with zipfile.ZipFile(buffer := io.BytesIO(), "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("weight", matrix.weight.detach().numpy().tobytes())
    zipped[share] = len(buffer.getvalue()) / (4 * matrix.weight.numel())
print({f"{share:.0%} zeros": f"{size:.2f} of the bytes" for share, size in zipped.items()})
assert zipped[0] > 0.8 > zipped[0.5] > zipped[0.9]
