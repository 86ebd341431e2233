# Solutions to notebook 10. Run them in the notebook, below its last cell: they use its variables.


# %% Your turn: every input takes the range of its axes, so two inputs that share an axis agree.
def profile_of(inputs, ranges):
    return {
        name: tuple(tuple(ranges[axis][which] for axis in axes.values()) for which in range(3))
        for name, axes in inputs.items()
    }


# %% Exercise 1
def takes(profile, shapes):
    return all(
        low <= size <= high
        for name, (smallest, _, largest) in profile.items()
        for low, size, high in zip(smallest, shapes[name], largest, strict=True)
    )


mended = profile_of(INPUTS, RANGES)
assert takes(mended, dict.fromkeys(INPUTS, (8, 64)))
assert not takes(mended, dict.fromkeys(INPUTS, (9, 16))) and not takes(mended, dict.fromkeys(INPUTS, (1, 65)))
narrow = {**mended, "attention_mask": ((1, 1), (1, 16), (4, 64))}
assert not takes(narrow, dict.fromkeys(INPUTS, (5, 16))) and takes(narrow, dict.fromkeys(INPUTS, (4, 16)))

# %% Exercise 2: the T4 is on the list, but its generation cannot run a product of this graph in fp32; the H100 is not.
named = {"T4": "SM75", "RTX 3090": "SM86", "L4": "SM89", "H100": "SM90", "RTX 5090": "SM120"}
if trt:
    buildable = [name for name, card in named.items() if card in targets and build(fp32, wide, [card]) is not None]
    print("built for", *buildable)
    assert buildable == ["RTX 3090", "L4", "RTX 5090"]

# %% Exercise 3: before a decoder's first step there are no tokens, so its past is empty. An engine whose past begins at
# 1 does not take that shape: the first step of every request is refused.
from t5accel.errors import InputError

try:
    Sizes(P=Range(1, 8, 32))
except InputError as error:
    print(error)
else:
    raise AssertionError("a past from 1 was not refused")
late = profile_of({"past": {0: "batch", 1: "past"}}, RANGES | {"past": (1, 8, 32)})
assert not takes(late, {"past": (1, 0)})
