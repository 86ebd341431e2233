"""Stage 1 of version 4: translation, and copying from the start. """
import random, sys
from pathlib import Path
import torch
from transformers import AutoTokenizer
from t5accel.mini.mixture import mini_examples, evaluation_sources
from t5accel.mini.pairs import joined, read_pairs, split_pairs
from t5accel.mini.train import TrainConfig, train, vocabulary_texts
from t5accel.mini.vocabulary import train_tokenizer
from t5accel.students.batches import Mixture, Part, Phase
from t5accel.tasks import TRANSLATE

STEPS = int(sys.argv[1])
torch.set_num_threads(int(sys.argv[2]))
here = Path(sys.argv[3])
pairs = read_pairs(sys.argv[4])
split = split_pairs(pairs, 1000)
long = sorted({e for e, _ in split.train if 9 <= len(e.split()) <= 20})
held_long = set(random.Random("long").sample(long, 1000))
train_pairs = tuple(p for p in split.train if p[0] not in held_long)
balanced = tuple(p for p in train_pairs for _ in range(max(1, min(len(p[0].split()), 14) - 3)))
print(len(pairs), len(train_pairs), len(balanced), flush=True)

CURRICULUM = (
    Phase(0, (Part("translation", 4500, weight=0.9), Part("repetition", 1000, 0.5, 0.1)), dropout=0.05),
    Phase(1000, (Part("translation", 4500, weight=0.85), Part("near recall", 1200, 0.5, 0.15)), dropout=0.05),
)
folder = here / "stage1"
if not (folder / "tokenizer/tokenizer.json").is_file():
    from t5accel.mini.stories import some_names
    texts = vocabulary_texts(train_pairs, 0)
    train_tokenizer(texts, 8000).save_pretrained(folder / "tokenizer")
tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
examples = dict(mini_examples(train_pairs))
def translation(rng):
    english, french = joined(balanced, rng, 0.08)
    return TRANSLATE + english, french
examples["translation"] = translation
mixture = Mixture(examples, CURRICULUM, evaluation_sources())
held = [(TRANSLATE + e, r[0]) for e, r in split.held_out[:300]]
config = TrainConfig(steps=STEPS, decay_share=0.001, dropout=0.05)
train(mixture, tokenizer, held, folder, config, validate_every=250, save_every=100)
