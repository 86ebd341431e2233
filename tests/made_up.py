"""What tests share: made-up pairs, a tokenizer of single letters, one that panics, and the log of a run."""

import json
from pathlib import Path
from typing import Any

from t5accel.models.prefixes import TRANSLATE
from t5accel.tokenization import TokenizerFile

WHO = {"The baker": "Le boulanger", "My sister": "Ma sœur", "An old sailor": "Un vieux marin", "Nobody": "Personne"}
DOES = {"paints": "peint", "carries": "porte", "forgets": "oublie", "repairs": "répare"}
WHAT = {"a red boat": "un bateau rouge", "the broken clock": "l'horloge cassée", "7 ladders": "7 échelles"}
PAIRS = tuple(
    (f"{who} {does} {what}{end}", f"{qui} {fait} {quoi}{fin}")
    for who, qui in WHO.items()
    for does, fait in DOES.items()
    for what, quoi in WHAT.items()
    for end, fin in ((".", "."), ("!", " !"))
)
CORPUS = [TRANSLATE + english for english, _ in PAIRS] + [french for _, french in PAIRS]


def characters(texts: list[str]) -> list[list[int]]:
    return [[ord(c) for c in text] for text in texts]


def texts_of(rows: list[list[int]]) -> list[str]:
    return ["".join(map(chr, row)) for row in rows]


def log(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def panicking_tokenizer(folder: Path) -> TokenizerFile:
    """One whose library panics on a line end before a space, as that of a T5 does to which "\\n" was added."""
    from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers

    made = Tokenizer(models.Unigram([("<pad>", 0.0), ("<unk>", 0.0), ("a", -1.0), ("▁", -2.0)], unk_id=1))
    spaces = normalizers.Replace(Regex(" {2,}"), "▁")
    made.normalizer = normalizers.Sequence([normalizers.Nmt(), normalizers.Strip(left=False), spaces])
    made.add_tokens([AddedToken("\n", normalized=True)])
    made.save(str(folder / "tokenizer.json"))
    return TokenizerFile(folder)
