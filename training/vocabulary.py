"""Make the bundled model's tokenizer: a Unigram vocabulary with Metaspace, as T5's own, trained on our three tasks.

Three choices help a tiny model: digits stand alone (numbers are copied digit by digit), sentence punctuation stands
alone (no separate pieces for "house" and "house."), and every printable Latin character is in the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable

PAD, EOS, UNK = "<pad>", "</s>", "<unk>"

TWIN = "\ue000"  # a private-use character that no text contains

# Every character that English and French text needs, so that an unseen name can still be spelt.
ALPHABET = [chr(c) for c in range(33, 127)] + list("àâäæçéèêëîïôöœùûüÿÀÂÄÆÇÉÈÊËÎÏÔÖŒÙÛÜŸ«»€°")


def train_tokenizer(texts: Iterable[str], vocab_size: int = 6000):
    """Train a Unigram tokenizer and return it as a ``PreTrainedTokenizerFast`` with T5's special tokens.

    ``<pad>`` is 0 (also the decoder's start token), ``</s>`` 1 and is appended to every text, ``<unk>`` 2.

    >>> tokenizer = train_tokenizer(["the cat", "the cats", "the 12 cats"] * 20, vocab_size=150)
    >>> tokenizer.convert_ids_to_tokens(tokenizer("the cats 12").input_ids)
    ['▁the', '▁cats', '▁', '1', '2', '</s>']
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always"),
            pre_tokenizers.Split(Regex(r'▁?[.,!?;:"()]'), behavior="isolated"),
            pre_tokenizers.Digits(individual_digits=True),
        ]
    )
    tokenizer.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, EOS, UNK],
        unk_token=UNK,
        initial_alphabet=["▁", *ALPHABET],
        max_piece_length=16,
        show_progress=False,
    )
    texts = list(texts)
    words = {
        piece
        for text in texts
        for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(tokenizer.normalizer.normalize_str(text))
    }
    # The trainer takes its candidate pieces from the list of different words and drops what occurs there once, so
    # that "▁French" or "▁?" could never become one piece however common. A marked twin lets each be a candidate.
    twins = [word.replace("▁", "") + TWIN for word in sorted(words)]
    tokenizer.train_from_iterator([*texts, *twins], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}", pair=f"$A {EOS} $B {EOS}", special_tokens=[(EOS, tokenizer.token_to_id(EOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=UNK, model_max_length=512,
        model_input_names=["input_ids", "attention_mask"],  # without it 4.57 adds token_type_ids, which T5 refuses
    )  # fmt: skip
