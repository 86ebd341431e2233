"""Translation pairs: read a tab-separated file, hold sentences out, join short ones into long ones.

What is held out follows from the English sentences alone, in whatever order they come, so that every run, machine and
later student agrees on which sentences no model has ever been trained on.
"""

from __future__ import annotations

import hashlib
import random
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from t5accel.errors import InputError

# English as it is spelt in Britain: training pairs are mostly American, and people type both.


# Beginnings of words, whatever follows; then whole words, which may have an s.
_BEGINNINGS = """
color/colour favor/favour neighbor/neighbour center/centre theater/theatre honor/honour labor/labour humor/humour
behavior/behaviour rumor/rumour flavor/flavour harbor/harbour traveler/traveller realiz/realis apologiz/apologis
recogniz/recognis organiz/organis criticiz/criticis memoriz/memoris
"""
_WORDS = """
gray/grey mom/mum traveling/travelling traveled/travelled canceled/cancelled jewelry/jewellery pajamas/pyjamas
program/programme meter/metre kilometer/kilometre liter/litre math/maths tire/tyre skillful/skilful mustache/moustache
airplane/aeroplane catalog/catalogue defense/defence license/licence cozy/cosy plow/plough parlor/parlour odor/odour
vapor/vapour savior/saviour vigor/vigour mold/mould molded/moulded counselor/counsellor jeweler/jeweller woolen/woollen
"""
_BRITISH = dict(pair.split("/") for pair in (_BEGINNINGS + _WORDS).split())


def _either(pairs: str) -> str:
    return "|".join(sorted((pair.split("/")[0] for pair in pairs.split()), key=len, reverse=True))


_AMERICAN = re.compile(rf"\b(?:({_either(_BEGINNINGS)})|({_either(_WORDS)})(?=s?\b))", re.IGNORECASE)


def to_british(text: str) -> str:
    """The same in British spelling, capitals as they were.

    >>> to_british("My neighbor's favorite colors are gray and white. Mom apologized.")
    "My neighbour's favourite colours are grey and white. Mum apologised."
    """

    def other(found: re.Match[str]) -> str:
        word = _BRITISH[found[0].lower()]
        return word[0].upper() + word[1:] if found[0][0].isupper() else word

    return _AMERICAN.sub(other, text)


Pair = tuple[str, str]

WHERE_TO_GET_PAIRS = (
    "Give a UTF-8 file with one 'English<TAB>French' pair a line: the eng-fra list of Tatoeba "
    "(tatoeba.org, Downloads; CC BY 2.0 FR) is what the bundled model was trained on."
)


LONG = range(9, 21)  # words of an English sentence that is long

HeldOut = tuple[tuple[str, tuple[str, ...]], ...]  # English sentences, each with all its French references


@dataclass(frozen=True)
class PairSplit:
    """Training pairs and, apart from them, sentences held out: of any length, and others that are all long."""

    train: tuple[Pair, ...]
    held_out: HeldOut
    held_out_long: HeldOut


def tidy(text: str) -> str:
    """Normalise as the tokenizer does (NFKC, single spaces), so that references and outputs are comparable.

    >>> tidy("Va\\u202f!  Vite.")
    'Va ! Vite.'
    """
    return " ".join(unicodedata.normalize("NFKC", text).split())


def read_pairs(path: str | Path) -> list[Pair]:
    """Read ``English<TAB>French`` lines. Raises ``InputError`` that says what to do."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"No translation pairs at {path}. {WHERE_TO_GET_PAIRS}")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 ({error}). {WHERE_TO_GET_PAIRS}") from error
    pairs = []
    # str.splitlines would also cut inside a sentence, at U+2028 and its like
    for number, line in enumerate(text.removesuffix("\n").split("\n") if text else [], 1):
        fields = line.split("\t")
        if len(fields) < 2 or not fields[0].strip() or not fields[1].strip():
            raise InputError(f"{path}, line {number}: no 'English<TAB>French' pair in {line!r}. {WHERE_TO_GET_PAIRS}")
        pairs.append((tidy(fields[0]), tidy(fields[1])))
    return pairs


def split_pairs(pairs: Iterable[Pair], held_out: int = 1000) -> PairSplit:
    """Hold out the ``held_out`` English sentences with the smallest SHA-256, and as many long ones among the others.

    The long ones, of 9 to 20 words, are drawn with a fixed seed; of fewer than twice as many, half are held out.

    >>> split = split_pairs([("Go.", "Va !"), ("Go.", "Allez !"), ("Run!", "Cours !")], held_out=1)
    >>> len(split.held_out), all(english != split.held_out[0][0] for english, _ in split.train)
    (1, True)
    """
    by_source: dict[str, list[str]] = {}
    for english, french in pairs:
        by_source.setdefault(english, []).append(french)
    if not 0 <= held_out < len(by_source):
        raise InputError(
            f"Cannot hold out {held_out} of {len(by_source)} English sentences: give more pairs or hold out fewer."
        )
    first = sorted(by_source, key=lambda english: hashlib.sha256(english.lower().encode()).hexdigest())[:held_out]
    long = sorted(english for english in by_source.keys() - set(first) if len(english.split()) in LONG)
    second = random.Random("long").sample(long, min(held_out, len(long) // 2))
    chosen = {*first, *second}

    def with_references(sentences: list[str]) -> HeldOut:
        return tuple((english, tuple(by_source[english])) for english in sentences)

    return PairSplit(
        train=tuple(
            (english, french) for english, frenches in by_source.items() if english not in chosen for french in frenches
        ),
        held_out=with_references(first),
        held_out_long=with_references(second),
    )


def balance_pairs(pairs: Iterable[Pair]) -> tuple[Pair, ...]:
    """Each pair 2 to 15 times: more often the longer it is, up to ten words, and the rarer its rarest English word is.

    Lists for learners are mostly of short sentences in the same few words.

    >>> drawn = balance_pairs([("Go on.", "Va !")] * 150 + [("She saw it all there.", "Elle y a tout vu.")])
    >>> [drawn.count(pair) for pair in sorted(set(drawn))]
    [300, 8]
    """
    pairs = tuple(pairs)
    words = [set(re.findall(r"[a-z']+", english.lower())) for english, _ in pairs]
    counts = Counter(word for found in words for word in found)
    chosen: list[Pair] = []
    for pair, found in zip(pairs, words, strict=True):
        length = min(max(len(pair[0].split()) / 4, 1.0), 2.5)
        rarity = min(max((150 / min((counts[word] for word in found), default=1)) ** 0.5, 1.0), 3.0)
        chosen += [pair] * round(2 * length * rarity)
    return tuple(chosen)


def join_pairs(pairs: tuple[Pair, ...], rng: random.Random, share: float = 0.25) -> Pair:
    """One pair, or with probability ``share`` two to four joined by spaces: the file's sentences are short."""
    count = rng.choices((2, 3, 4), (6, 3, 1))[0] if rng.random() < share else 1
    chosen = [pairs[rng.randrange(len(pairs))] for _ in range(count)]
    return " ".join(english for english, _ in chosen), " ".join(french for _, french in chosen)
