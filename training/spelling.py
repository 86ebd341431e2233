"""English as it is spelt in Britain: training pairs are mostly American, and people type both."""

from __future__ import annotations

import re

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


def british(text: str) -> str:
    """The same in British spelling, capitals as they were.

    >>> british("My neighbor's favorite colors are gray and white. Mom apologized.")
    "My neighbour's favourite colours are grey and white. Mum apologised."
    """

    def other(found: re.Match[str]) -> str:
        word = _BRITISH[found[0].lower()]
        return word[0].upper() + word[1:] if found[0][0].isupper() else word

    return _AMERICAN.sub(other, text)
