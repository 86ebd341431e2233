"""Beam search and sampling of transformers' ``generate`` in our own loops, where a backend takes many steps at once.

Whatever these loops do not know, a processor, a criterion, a streamer, an output beside the tokens, is left to
transformers, step by step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers.generation import (
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    LogitNormalization,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from t5accel.backends.hf_cache import DecoderCache
from t5accel.decoding.beam import BeamState
from t5accel.decoding.request import StepStream
from t5accel.decoding.sampling import SamplingParams, generators, run_steps
from t5accel.decoding.token_constraints import NO_CONSTRAINTS, TokenConstraints
from t5accel.errors import InputError

# In the order in which `sampling.probabilities` applies them: where each number stands, and its name in
# `SamplingParams`.
_CHANGES = {
    RepetitionPenaltyLogitsProcessor: ("penalty", "repetition_penalty"),
    TemperatureLogitsWarper: ("temperature", "temperature"),
    TopKLogitsWarper: ("top_k", "top_k"),
    TopPLogitsWarper: ("top_p", "top_p"),
    MinPLogitsWarper: ("min_p", "min_p"),
}


class DeviceLoops:
    """Half of `hf_generate.AcceleratedT5`, whose ``_plain_request`` says the lengths, ends and criteria of a call."""

    backend: Any

    def _draws_on_the_device(self) -> bool:
        """On a CPU sampling is left to transformers, whose draws a seed of torch's repeats."""
        return hasattr(self.backend, "run_samples") and torch.device(self.backend.device).type != "cpu"

    def _beam_search(
        self, input_ids: torch.Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any,
        synced_gpus: bool = False, **model_kwargs: Any,
    ) -> Any:  # fmt: skip
        config, found, beams = generation_config, None, generation_config.num_beams
        if hasattr(self.backend, "run_beams") and not config.do_sample:
            found = _rules(logits_processor, self.backend.vocab_size)
        if found is not None:
            request = self._plain_request(
                input_ids[::beams], found[1], stopping_criteria, config, model_kwargs, rows=beams
            )
            search = None if request is None else _beams(self.backend, replace(request, rules=found[0]), config)
            if search is not None:
                search.run(self.backend, model_kwargs["past_key_values"].state, request.prefix)
                pad = self.backend.pad_token_id or int(config._eos_token_tensor[0])  # transformers' own choice
                new, _ = search.best(config.num_return_sequences, pad_token_id=pad)
                given = np.repeat(request.prefix, config.num_return_sequences, axis=0)
                return torch.from_numpy(np.concatenate([given, new], axis=1)).to(input_ids.device)
        return super()._beam_search(
            input_ids, logits_processor=logits_processor, stopping_criteria=stopping_criteria,
            generation_config=generation_config, synced_gpus=synced_gpus, **model_kwargs,
        )  # fmt: skip

    def _sample(
        self, input_ids: torch.Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any,
        synced_gpus: bool = False, streamer: Any = None, **model_kwargs: Any,
    ) -> Any:  # fmt: skip
        """The seed of draws on the device comes from torch's generator: ``torch.manual_seed`` repeats them."""
        config, found = generation_config, None
        if config.do_sample and streamer is None and self._draws_on_the_device():
            found = _sampling(logits_processor)
        if found is not None:
            sampling, others = found
            rules, others = _rules(others, self.backend.vocab_size) or (NO_CONSTRAINTS, others)
            cache = model_kwargs.get("past_key_values")
            rows = cache.shape[1] if isinstance(cache, DecoderCache) else 1
            request = self._plain_request(input_ids[::rows], others, stopping_criteria, config, model_kwargs, rows=rows)
            if request is not None:
                seed, given = int(torch.randint(2**62, ())), np.repeat(request.prefix, rows, axis=0)
                draws = generators(seed, len(request.ids), rows)
                steps = run_steps(self.backend, replace(request, rules=rules), given, sampling, draws, cache.state)
                tokens = StepStream(given, self.backend.pad_token_id, steps).generated().sequences
                return torch.from_numpy(tokens).to(input_ids.device)
        return super()._sample(
            input_ids, logits_processor=logits_processor, stopping_criteria=stopping_criteria,
            generation_config=generation_config, synced_gpus=synced_gpus, streamer=streamer, **model_kwargs,
        )  # fmt: skip


def _beams(backend: Any, request: Any, config: Any) -> BeamState | None:
    """The search that is asked for; ``None`` where `BeamState` refuses it, or an answer would end with its first
    token."""
    if request.rules.forced_bos_token_id in request.eos_token_ids:
        return None
    try:
        return BeamState(
            len(request.ids), config.num_beams, vocab_size=backend.vocab_size, eos_token_id=request.eos_token_ids[0],
            max_new_tokens=request.max_new_tokens, min_new_tokens=request.min_new_tokens,
            length_penalty=config.length_penalty, early_stopping=config.early_stopping,
            rules=replace(request.rules, eos_token_ids=request.eos_token_ids), begun=request.prefix.shape[1] > 1,
        )  # fmt: skip
    except InputError:
        return None


def _rules(processors: Sequence[Any], vocab_size: int) -> tuple[TokenConstraints, list[Any]] | None:
    """Forced and suppressed tokens, and the processors of other kinds; ``None`` where these rules cannot say it.

    >>> rules, others = _rules([ForcedBOSTokenLogitsProcessor(7), SuppressTokensLogitsProcessor([5, 6]), "other"], 9)
    >>> rules.forced_bos_token_id, rules.suppress_tokens, others
    (7, (5, 6), ['other'])
    """
    fields: dict[str, Any] = {}
    others, never, seen = [], set(), {type(each) for each in processors}
    for each in processors:
        if type(each) is ForcedBOSTokenLogitsProcessor:
            fields["forced_bos_token_id"] = each.bos_token_id
        elif type(each) is ForcedEOSTokenLogitsProcessor:
            ends = each.eos_token_id.tolist()
            if len(ends) > 1:
                return None
            fields["forced_eos_token_id"] = ends[0]
        elif type(each) is SuppressTokensLogitsProcessor:
            never.update(token for token in each.suppress_tokens.tolist() if token < vocab_size)
        elif type(each) is NoBadWordsLogitsProcessor:
            if any(len(word) > 1 for word in each.sequence_bias):
                return None
            never.update(word[0] for word in each.sequence_bias)
        elif type(each) is LogitNormalization:
            fields["renormalize_logits"] = True
        else:
            others.append(each)
    named = [*never, *(token for name, token in fields.items() if name.startswith("forced"))]
    if len(seen) < len(processors) or max(named, default=0) >= vocab_size:  # transformers says what is wrong with those
        return None
    return TokenConstraints(**fields, suppress_tokens=tuple(sorted(never))), others


def _sampling(processors: Sequence[Any]) -> tuple[SamplingParams, list[Any]] | None:
    """What is changed in the distribution, and the other processors; ``None`` where `SamplingParams` means
    something else.

    >>> _sampling([TemperatureLogitsWarper(0.5), TopKLogitsWarper(7), "other"])
    (SamplingParams(temperature=0.5, top_k=7, top_p=1.0, min_p=0.0, repetition_penalty=1.0), ['other'])
    """
    changes = [each for each in processors if type(each) in _CHANGES]
    order = [[*_CHANGES].index(type(each)) for each in changes]
    usual = dict(filter_value=-float("inf"), min_tokens_to_keep=1, prompt_ignore_length=None)
    if order != sorted(set(order)) or any(
        getattr(each, name, value) not in (value, None) for each in changes for name, value in usual.items()
    ):
        return None
    fields = {_CHANGES[type(each)][1]: getattr(each, _CHANGES[type(each)][0]) for each in changes}
    try:
        return SamplingParams(**fields), [each for each in processors if type(each) not in _CHANGES]
    except InputError:
        return None
