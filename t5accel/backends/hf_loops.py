"""Searches of transformers' ``generate`` in our own loops."""

# Plain searches run on the backend alone, beams also with repetition penalties and n-gram bans. With other processors,
# criteria or streamers, greedy search and sampling do what transformers' loop does. Beams with those, scores and a
# caller's cache are left to transformers' loops.

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import generation

from t5accel.backends.hf_cache import CACHE, DecoderCache, discard_draws
from t5accel.checks import as_integers, check_vocabulary
from t5accel.decoding.beam import BeamState
from t5accel.decoding.greedy_search import greedy_steps
from t5accel.decoding.request import GenerationInputs, StepStream
from t5accel.decoding.sampling import SamplingParams, generators, run_steps
from t5accel.decoding.token_constraints import TokenConstraints
from t5accel.errors import InputError

_LENGTH_PROCESSORS = {generation.MinLengthLogitsProcessor, generation.MinNewTokensLengthLogitsProcessor}
# In the order in which `sampling.probabilities` applies them: the attribute with the number, and its name in
# `SamplingParams`.
_WARPERS = {
    generation.RepetitionPenaltyLogitsProcessor: ("penalty", "repetition_penalty"),
    generation.TemperatureLogitsWarper: ("temperature", "temperature"),
    generation.TopKLogitsWarper: ("top_k", "top_k"),
    generation.TopPLogitsWarper: ("top_p", "top_p"),
    generation.MinPLogitsWarper: ("min_p", "min_p"),
}


class BackendLoops:
    """Greedy search, sampling and beam search of `hf_generate.AcceleratedT5` on its backend."""

    backend: Any
    decoder_draws = 0  # of `hf_cache.discard_draws`, for each call

    def _is_altered(self) -> bool:
        """Whether somebody changed what transformers calls at each step, which our loops would not call."""
        altered = vars(self).keys() & {"forward", "prepare_inputs_for_generation"}
        return bool(altered or self._forward_hooks or self._forward_pre_hooks)

    def _sample(self, input_ids: torch.Tensor, *, streamer: Any = None, **call: Any) -> Any:
        if self._is_altered():
            return super()._sample(input_ids, streamer=streamer, **call)
        if streamer is None:
            decode = self._draw if call["generation_config"].do_sample else self._greedy
            tokens = decode(input_ids, **call)
            if tokens is not None:
                return torch.from_numpy(tokens).to(input_ids.device)
        # On a GPU transformers 5 draws once more than it says, before it looks whether all rows have ended.
        if input_ids.device.type == "cpu" and _is_private(**call):
            return self._steps(input_ids, streamer, **call)
        return super()._sample(input_ids, streamer=streamer, **call)

    def _beam_search(self, input_ids: torch.Tensor, **call: Any) -> Any:
        with self._beside_the_runtime(**call):
            if not call["generation_config"].do_sample and not self._is_altered():
                tokens = self._beams(input_ids, **call)
                if tokens is not None:
                    return torch.from_numpy(tokens).to(input_ids.device)
            return super()._beam_search(input_ids, **call)

    @contextmanager
    def _beside_the_runtime(self, logits_processor: Any, stopping_criteria: Any, **_: Any) -> Iterator[None]:
        """Run transformers' own processors and criteria on one thread, if the backend's threads are not torch's."""
        # ONNX Runtime's threads spin between two steps: a second thread of torch's waits milliseconds for its core
        # where the scores of all beams are normalised. For sampling one thread was no gain.
        parts, threads = (*logits_processor, *stopping_criteria), torch.get_num_threads()
        device = getattr(getattr(self.backend, "settings", None), "device", None)
        if (
            device != "cpu"
            or threads == 1
            or not all(type(each).__module__.startswith("transformers.") for each in parts)
        ):
            yield
            return
        others = threading.Thread(target=torch.set_num_threads, args=(threads,))
        try:
            torch.set_num_threads(1)
            # It holds for this thread, and for new threads of the process unless another one says otherwise.
            others.start()
            others.join()
            yield
        finally:
            torch.set_num_threads(threads)

    def _steps(
        self,
        sequences: torch.Tensor,
        streamer: Any,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **call: Any,
    ) -> torch.Tensor:
        """transformers' ``_sample`` with any processors and criteria, draw by draw, without inputs and outputs."""
        cache: DecoderCache = call[CACHE]
        ends = any(hasattr(each, "eos_token_id") for each in stopping_criteria)
        is_open = torch.ones(len(sequences), dtype=torch.bool, device=sequences.device)
        while True:
            # A copy, which processors may write into: the backend uses the memory of its logits again.
            scores = logits_processor(sequences, cache.append(sequences[:, cache.length :])[:, -1].clone())
            discard_draws(self.decoder_draws)
            if generation_config.do_sample:
                tokens = torch.multinomial(scores.softmax(dim=-1), num_samples=1).squeeze(1)
            else:
                tokens = scores.argmax(dim=-1)
            if ends:
                tokens = torch.where(is_open, tokens, generation_config._pad_token_tensor)
            sequences = torch.cat([sequences, tokens[:, None]], dim=-1)
            if streamer is not None:
                streamer.put(tokens)
            is_open = is_open & ~stopping_criteria(sequences, None)
            if not is_open.any():
                break
        if streamer is not None:
            streamer.end()
        return sequences

    def _greedy(self, prefix: torch.Tensor, **call: Any) -> np.ndarray | None:
        request = self._as_request(prefix, **call)
        if request is None:
            return None
        steps = greedy_steps(self.backend, request, call[CACHE].state)
        found = StepStream(request.prefix, self.backend.pad_token_id, steps).generated().sequences
        discard_draws(self.decoder_draws * (found.shape[1] - request.prefix.shape[1]))
        return found

    def _draws_on_the_device(self) -> bool:
        """On a CPU transformers' processors draw, so that a seed of torch's gives its tokens."""
        return hasattr(self.backend, "run_samples") and torch.device(self.backend.device).type != "cpu"

    def _draw(self, prefix: torch.Tensor, logits_processor: Any, **call: Any) -> np.ndarray | None:
        found = _sampling(logits_processor) if self._draws_on_the_device() else None
        if found is None:
            return None
        sampling, processors = found
        cache = call.get(CACHE)
        rows = cache.shape[1] if isinstance(cache, DecoderCache) else 1
        request = self._as_request(prefix[::rows], processors, rows=rows, **call)
        if request is None:
            return None
        given = np.repeat(request.prefix, rows, axis=0)
        draws = generators(int(torch.randint(2**62, ())), len(request.ids), rows)  # torch.manual_seed repeats them
        steps = run_steps(self.backend, request, given, sampling, draws, cache.state)
        return StepStream(given, self.backend.pad_token_id, steps).generated().sequences

    def _beams(
        self, prefix: torch.Tensor, logits_processor: Any, generation_config: Any, **call: Any
    ) -> np.ndarray | None:
        config, beams = generation_config, generation_config.num_beams
        history = [each for each in logits_processor if _reads_history(each)]
        others = [each for each in logits_processor if not _reads_history(each)]
        request = self._as_request(prefix[::beams], others, generation_config=config, rows=beams, **call)
        # An answer that ends with its first token, and a mode that transformers refuses, are left to it.
        if request is None or request.rules.forced_bos_token_id in request.eos_token_ids or config.low_memory:
            return None
        steps = range(request.max_new_tokens)
        if config.num_return_sequences > 1 and all(request.forced_token(step) is not None for step in steps):
            return None  # there is one answer, which transformers returns several times
        banned = len(request.rules.suppress_tokens) + (prefix.shape[1] + request.max_new_tokens) * bool(history)
        if banned and banned + (1 + len(request.eos_token_ids)) * beams > self.backend.vocab_size:
            return None  # with too few candidates transformers takes banned ones, or copies of the first beam
        try:
            search = BeamState(
                len(request.ids), beams, vocab_size=self.backend.vocab_size, eos_token_id=request.eos_token_ids[0],
                max_new_tokens=request.max_new_tokens, min_new_tokens=request.min_new_tokens,
                length_penalty=config.length_penalty, early_stopping=config.early_stopping,
                rules=replace(request.rules, eos_token_ids=request.eos_token_ids),
                has_prefix=request.prefix.shape[1] > 1,
            )  # fmt: skip
        except InputError:  # transformers searches more than `BeamState` does
            return None
        process = partial(_process, history) if history else None
        search.run(self.backend, call[CACHE].state, request.prefix, process)
        discard_draws(self.decoder_draws * search.length)
        pad = self.backend.pad_token_id or int(config._eos_token_tensor[0])  # transformers' own choice
        new, _ = search.best(config.num_return_sequences, pad_token_id=pad)
        return np.concatenate([np.repeat(request.prefix, config.num_return_sequences, axis=0), new], axis=1)

    def _as_request(
        self,
        prefix: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        rows: int = 1,
        **others: Any,
    ) -> GenerationInputs | None:
        """The inputs of our own loop; ``None`` unless only lengths, ends and `TokenConstraints` bound the call."""
        cache, read = others.get(CACHE), prefix.shape[1]
        found = _constraints(logits_processor, self.backend.vocab_size)
        if found is None or not _is_private(**others) or cache.shape != (len(prefix), rows):
            return None
        rules, processors = found
        by_type = {type(each): each for each in (*processors, *stopping_criteria)}
        if (
            set(by_type) - _LENGTH_PROCESSORS != {generation.MaxLengthCriteria, generation.EosTokenCriteria}
            or len(by_type) < len(processors) + len(stopping_criteria)
            or generation_config._pad_token_tensor != self.backend.pad_token_id
        ):
            return None
        # A caller's own criterion or processor takes the place of the one that generate() makes, with other numbers.
        whole, ends = generation_config.max_length, tuple(generation_config._eos_token_tensor.reshape(-1).tolist())
        forces = [each for each in logits_processor if type(each) is generation.ForcedEOSTokenLogitsProcessor]
        known = [each.eos_token_id.reshape(-1).tolist() for each in by_type.values() if hasattr(each, "eos_token_id")]
        if (
            not float(whole).is_integer()
            or any(each.max_length != whole for each in (by_type[generation.MaxLengthCriteria], *forces))
            or not ends
            or any(tuple(one) != ends for one in known)
            or any(not 0 <= end < self.backend.vocab_size for end in ends)
        ):
            return None
        longest, least = int(whole) - read, 0
        if shortest := by_type.get(generation.MinLengthLogitsProcessor):
            least = shortest.min_length - read
        if shortest := by_type.get(generation.MinNewTokensLengthLogitsProcessor):
            least = max(least, shortest.prompt_length_to_skip + shortest.min_new_tokens - read)
        if longest < 1 or longest + read - 1 > getattr(self.backend, "positions", math.inf):
            return None
        given = as_integers(prefix, "decoder_input_ids", rank=2)
        check_vocabulary(given, self.backend.vocab_size, "decoder_input_ids")
        ids, mask = (array[cache.sources] for array in (cache.encoded.ids, cache.encoded.mask))
        return GenerationInputs(ids, mask, given, longest, max(0, min(least, longest)), ends, rules)


def _reads_history(processor: Any) -> bool:
    """Whether it is a function of one row's tokens and scores, and bans at most a token for each one before."""
    is_known = type(processor) in (generation.NoRepeatNGramLogitsProcessor, generation.RepetitionPenaltyLogitsProcessor)
    return is_known and getattr(processor, "prompt_ignore_length", None) is None


def _process(processors: Sequence[Any], sequences: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """Log-probabilities (n, K, V) as processors leave them."""
    scores = torch.from_numpy(logits.reshape(-1, logits.shape[-1]).copy()).log_softmax(dim=-1)
    ids = torch.from_numpy(sequences.reshape(len(scores), -1))
    for each in processors:
        scores = each(ids, scores)
    return scores.numpy().reshape(logits.shape)


def _is_private(decoder_attention_mask: Any = None, synced_gpus: bool = False, **call: Any) -> bool:
    """Whether nobody but the loop needs the cache, and none of its tokens is padding."""
    cache = call.get(CACHE)
    is_own = isinstance(cache, DecoderCache) and cache.is_private
    return is_own and decoder_attention_mask is None and not synced_gpus


def _constraints(processors: Sequence[Any], vocab_size: int) -> tuple[TokenConstraints, list[Any]] | None:
    """Forced and suppressed tokens, and the other processors; ``None`` where `TokenConstraints` cannot say it.

    >>> given = [generation.ForcedBOSTokenLogitsProcessor(7), generation.SuppressTokensLogitsProcessor([5]), "other"]
    >>> rules, others = _constraints(given, 9)
    >>> rules.forced_bos_token_id, rules.suppress_tokens, others
    (7, (5,), ['other'])
    """
    fields: dict[str, Any] = {}
    others, never, seen = [], set(), {type(each) for each in processors}
    for each in processors:
        if type(each) is generation.ForcedBOSTokenLogitsProcessor:
            if not isinstance(each.bos_token_id, int):  # several, each with a score of 0
                return None
            fields["forced_bos_token_id"] = each.bos_token_id
        elif type(each) is generation.ForcedEOSTokenLogitsProcessor:
            ends = each.eos_token_id.tolist()
            if len(ends) > 1:
                return None
            fields["forced_eos_token_id"] = ends[0]
        elif type(each) is generation.SuppressTokensLogitsProcessor:
            never.update(token for token in each.suppress_tokens.tolist() if 0 <= token < vocab_size)
        elif type(each) is generation.NoBadWordsLogitsProcessor:
            if any(len(word) != 1 for word in each.sequence_bias):
                return None
            never.update(word[0] for word in each.sequence_bias)
        elif type(each) is generation.LogitNormalization:
            fields["renormalize_logits"] = True
        else:
            others.append(each)
    forced = {token for name, token in fields.items() if name.startswith("forced")}
    # transformers says what is wrong with tokens outside the vocabulary, and whether a suppressed one is forced.
    is_outside = any(not 0 <= token < vocab_size for token in never | forced)
    if len(seen) < len(processors) or is_outside or never & forced:
        return None
    return TokenConstraints(**fields, suppress_tokens=tuple(sorted(never))), others


def _sampling(processors: Sequence[Any]) -> tuple[SamplingParams, list[Any]] | None:
    """Sampling parameters, and the other processors; ``None`` where `SamplingParams` means something else."""
    warpers = [each for each in processors if type(each) in _WARPERS]
    order = [[*_WARPERS].index(type(each)) for each in warpers]
    usual = dict(filter_value=-float("inf"), min_tokens_to_keep=1, prompt_ignore_length=None)
    if order != sorted(set(order)) or any(
        getattr(each, name, value) not in (value, None) for each in warpers for name, value in usual.items()
    ):
        return None
    fields = {_WARPERS[type(each)][1]: getattr(each, _WARPERS[type(each)][0]) for each in warpers}
    try:
        return SamplingParams(**fields), [each for each in processors if type(each) not in _WARPERS]
    except InputError:
        return None
