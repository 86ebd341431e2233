"""Any backend as a transformers model, with transformers' own ``generate``.

It is used as optimum's ORTModelForSeq2SeqLM is. Beams share one encoded source, and searches that
`hf_loops` knows run in our own loops.
"""

from __future__ import annotations

import copy
import os
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, GenerationConfig, GenerationMixin, PretrainedConfig
from transformers.modeling_outputs import Seq2SeqLMOutput
from transformers.models.auto import modeling_auto

from t5accel.backends.hf_cache import (
    CACHE,
    IS_V5,
    BackendEncoder,
    DecoderCache,
    EncodedBatch,
    as_cache,
    as_encoded,
    discard_draws,
    named_cache,
    reject_text,
    reject_unsupported,
)
from t5accel.backends.hf_loops import BackendLoops
from t5accel.backends.hf_module import WeightlessModule
from t5accel.backends.runtimes import export_backend
from t5accel.backends.torch_eager import TorchEager
from t5accel.checks import as_count, as_integers
from t5accel.decoding.backend import Backend, check_backend
from t5accel.decoding.token_constraints import check_special_tokens, constraints_from_config, special_tokens
from t5accel.errors import InputError, ModelUnavailableError
from t5accel.graphs.atomic_write import locked, staged
from t5accel.graphs.contract import MANIFEST, as_folder
from t5accel.graphs.manifest import read_manifest
from t5accel.models.families import GEMMAS
from t5accel.models.load import load_pretrained, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CACHES = (None, "dynamic", "dynamic_full")  # transformers' names for a cache that grows with the text
# Arguments and modes of `generate` that reach into the model.
_UNSUPPORTED = (
    "output_attentions", "output_hidden_states", "inputs_embeds", "decoder_inputs_embeds", "head_mask",
    "decoder_head_mask", "cross_attn_head_mask", "pixel_values",
)  # fmt: skip
_UNSUPPORTED_MODES = "prefill_chunk_size return_legacy_cache assistant_early_exit use_mtp speculation_type".split()
_NO_CACHE_WITH_LABELS = ("bart", "mbart", "marian", "pegasus")
_SHIFT_THE_SOURCE = ("bart", "mbart")  # where forward() has no decoder ids, as transformers does
_UPLOAD = ("repo_id", "commit_message", "commit_description", "private", "token", "revision", "create_pr", "tags")
_SHARDING = ("max_shard_size", "safe_serialization", "save_peft_format", "save_original_format")


def require_own_methods(model: Any) -> None:
    """Raise ``InputError`` if generation of a model object is not transformers' own, which would be lost."""
    for name in ("generate", "_get_logits_processor", "_get_stopping_criteria", "prepare_inputs_for_generation"):
        method = vars(model).get(name, getattr(type(model), name, None))
        if not str(getattr(method, "__module__", "")).startswith("transformers."):
            raise InputError(
                f"{type(model).__name__}.{name} must be transformers' own, got one of {method.__module__}: the "
                "accelerated model would not call it. Give a plain model, and in the call logits_processor= or so."
            )


def _of_decoder(config: Any) -> Any:
    """The decoder's configuration: of a T5Gemma its own."""
    return config.decoder if getattr(config, "model_type", None) in GEMMAS else config


class AcceleratedT5(WeightlessModule, BackendLoops, GenerationMixin):
    """A `Backend` as a transformers model, for inference.

    ``generate`` gives the tokens of transformers' own model in every mode of the installed version. Tensors may lie on
    any device; tokens come out where the input ids lie. Use it in a ``with`` block, or call ``close()``, to free the
    backend's weights early. ``encoder`` encodes a batch once for several calls:
    ``generate(encoder_outputs=model.encoder(ids, mask))``.

    Without an ``attention_mask``, ``generate`` of 4.57 takes padding for padding and that of 5.x takes it for text:
    give one; ``encoder_outputs`` keep theirs. A row whose mask is all zero gets a meaningless answer and changes no
    other row.

    A stored configuration's ``output_attentions``, ``output_hidden_states``, ``use_cache=False`` (with a warning) and
    kind of cache are ignored; asked for in a call, the first two raise `InputError`, as do caches and encoder outputs
    of other models.

    >>> import torch
    >>> from t5accel.backends.torch_eager import TorchEager
    >>> from t5accel.models.random_init import random_t5
    >>> own = random_t5(dict(d_model=8, d_kv=6, d_ff=16, num_heads=2, num_layers=1, vocab_size=32))
    >>> model = AcceleratedT5(TorchEager(own), own.config, own.generation_config)
    >>> ids, options = torch.tensor([[5, 6, 7, 1]]), dict(num_beams=3, max_new_tokens=6)
    >>> torch.equal(model.generate(ids, **options), own.generate(ids, **options))
    True
    """

    config_class = PretrainedConfig
    main_input_name = "input_ids"

    def __init__(
        self,
        backend: Backend,
        config: PretrainedConfig,
        generation_config: GenerationConfig | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ):
        check_backend(backend, ("reorder", "rollback", "select_sources"))
        # Marian's target may have a separate vocabulary; of a T5Gemma 5.x resizes that of the decoder's configuration.
        own = _of_decoder(config) if IS_V5 else config
        entries = getattr(own, "decoder_vocab_size", None) or getattr(own, "vocab_size", None)
        if entries != backend.vocab_size:
            name = "config.vocab_size" if own is config else "config.decoder.vocab_size"
            raise InputError(
                f"{name} must be the backend's, {backend.vocab_size!r}, got {entries!r}. Give the configuration of the "
                "model that the backend runs."
            )
        check_special_tokens(config, generation_config, backend)
        config = copy.deepcopy(config)  # transformers writes into it, and it may be that of a torch model in use
        config._attn_implementation = "eager"
        super().__init__(config)
        if generation_config is not None:
            self.generation_config = copy.deepcopy(generation_config)
        self.tokenizer: Any
        for settings in (self.config, self.generation_config):
            for name in ("output_attentions", "output_hidden_states"):
                if getattr(settings, name, None):  # a pipeline would hand it on, as if it had been asked for
                    setattr(settings, name, False)
        for name in ("cache_implementation", "return_legacy_cache", "prefill_chunk_size"):  # of the model's own cache
            if getattr(self.generation_config, name, None) is not None:
                setattr(self.generation_config, name, None)
        if self.generation_config.use_cache is False:
            self.generation_config.use_cache = True
            warnings.warn(
                "use_cache=False in the model's configuration is ignored: tokens are equal with the cache, and come "
                "sooner. generate(use_cache=False) decodes without it.",
                stacklevel=2,
            )
        self.backend, self.tokenizer = backend, tokenizer
        draws = not IS_V5 and config.model_type == "m2m_100"
        draws &= not isinstance(getattr(backend, "backend", backend), TorchEager)  # whose layers draw
        self.decoder_draws = config.decoder_layers if draws else 0
        self.encoder = BackendEncoder(
            backend, masks_padding=config.model_type == "t5gemma", draws=config.encoder_layers if draws else 0
        )
        self.eval()
        # transformers 4.57 logs an error when a pipeline is given a class that is not listed. No model has such a type.
        name = type(self).__name__
        modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.setdefault(f"t5accel {name}", name)

    def get_encoder(self, modality: str | None = None) -> BackendEncoder:
        return self.encoder

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: EncodedBatch | None = None,
        past_key_values: DecoderCache | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        cache: DecoderCache | None = None,
        **kwargs: Any,
    ) -> Seq2SeqLMOutput | tuple[Any, ...]:
        """Logits (R, T, V) float32 at each position, as transformers' own T5 gives them.

        Args:
            decoder_input_ids: (R, T), with ``past_key_values`` only the tokens that it has not read. If omitted: the
                labels shifted to the right, or for BART and mBART the source.
            decoder_attention_mask: (R, P + T), 0 for padding on the left.
            encoder_outputs: returned by ``encoder``, in place of the source.
            past_key_values: returned by an earlier call, in place of the source. Changed in place. From transformers
                5.24 on it is called ``cache``; both names work.
            labels: (R, T), -100 where they do not count in the mean cross-entropy ``loss``.
        """
        reject_unsupported(kwargs)
        given = named_cache({"past_key_values": past_key_values, "cache": cache})
        if given:
            cache = as_cache(given[CACHE], self.backend)
        else:
            if encoder_outputs is None:
                encoder_outputs = self.encoder(input_ids, attention_mask)
            cache = as_encoded(encoder_outputs).start(self.backend, attention_mask)
        if decoder_input_ids is None:
            shifted = input_ids if labels is None and self.config.model_type in _SHIFT_THE_SOURCE else labels
            if shifted is None:
                raise InputError("There is nothing to decode. Give decoder_input_ids or labels, or use generate().")
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(shifted)
        self._reject_inner_padding(decoder_input_ids)
        is_cached = getattr(_of_decoder(self.config), "use_cache", True) if use_cache is None else use_cache
        if labels is not None and self.config.model_type in _NO_CACHE_WITH_LABELS:
            is_cached = False
        if not (given or is_cached) and decoder_attention_mask is None:
            self._reject_masked_padding(decoder_input_ids)
        logits, loss = cache.append(decoder_input_ids, decoder_attention_mask), None
        discard_draws(self.decoder_draws)
        logits = logits.to(getattr(decoder_input_ids, "device", "cpu"))
        if labels is not None:
            expected = labels.flatten().to(logits.device)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), expected, ignore_index=-100)
        output = Seq2SeqLMOutput(loss=loss, logits=logits, **{CACHE: cache if is_cached else None})
        is_named = self.config.return_dict if return_dict is None else return_dict
        return output if is_named else output.to_tuple()

    def prepare_decoder_input_ids_from_labels(self, labels: torch.Tensor) -> torch.Tensor:
        """(R, T) labels -> the start token and all but the last label, with padding in place of -100."""
        if self.config.model_type == "mbart":  # whose start is the language, behind the end of each label
            from transformers.models.mbart.modeling_mbart import shift_tokens_right

            return shift_tokens_right(labels, self.config.pad_token_id)
        own = _of_decoder(self.config)
        first = "decoder_start_token_id" if own is self.config else "bos_token_id"
        start, pad = (getattr(own, name, None) for name in (first, "pad_token_id"))
        start = self.backend.decoder_start_token_id if start is None else start
        shifted = torch.cat([labels.new_full((len(labels), 1), start), labels[:, :-1]], dim=1)
        return shifted.masked_fill(shifted == -100, self.backend.pad_token_id if pad is None else pad)

    def generate(self, inputs: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """transformers' own ``generate``: (B, S) ``input_ids``, or ``encoder_outputs``, and all its options."""
        given = kwargs.get("input_ids") if inputs is None else inputs
        reject_text(given)
        if given is not None and not isinstance(given, torch.Tensor):
            raise InputError(
                f"input_ids must be a tensor (B, S) of token ids, got {type(given).__name__}. Give torch.tensor(…)."
            )
        if given is None and kwargs.get("encoder_outputs") is None:
            reject_unsupported({name: kwargs.get(name) for name in _UNSUPPORTED})
            raise InputError("There is nothing to answer. Give input_ids (B, S), or encoder_outputs.")
        # transformers' loop runs where the inputs are: with them go its processors, and the tokens come out there.
        device = as_encoded(kwargs["encoder_outputs"]).device if given is None else given.device
        kwargs = {name: one.to(device) if isinstance(one, torch.Tensor) else one for name, one in kwargs.items()}
        self._reject_inner_padding(kwargs.get("decoder_input_ids"))
        with self.looping_on(device):
            return super().generate(inputs, *args, **named_cache(kwargs))

    def _reject_inner_padding(self, ids: Any) -> None:
        # The positions behind it depend on whether transformers' M2M100 reads them at once or one by one.
        if isinstance(ids, torch.Tensor) and self.config.model_type == "m2m_100" and ids.dim() == 2:
            pads = ids == self.backend.pad_token_id
            if (pads[:, :-1] & ~pads[:, 1:]).any():
                raise InputError("decoder_input_ids of an M2M100 must have no padding before other tokens, got some.")

    def _reject_masked_padding(self, ids: Any) -> None:
        if not self.encoder.masks_padding:
            return
        pads = as_integers(ids, "decoder_input_ids", rank=2) == self.backend.pad_token_id
        if self.is_looping:  # generate() reads nothing at the padding behind an answer
            pads = pads[:, :-1] & ~pads[:, 1:]
        if pads.any():
            raise InputError(
                "use_cache must be left out for a T5Gemma whose decoder reads padding: without a cache it masks that."
            )

    # `generate` calls the next methods. 4.57 and 5.x give whole sequences, and more arguments than a backend needs.

    def prepare_inputs_for_generation(
        self,
        input_ids: torch.Tensor,
        past_key_values: DecoderCache | None = None,
        attention_mask: torch.Tensor | None = None,
        encoder_outputs: EncodedBatch | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        use_cache: bool | None = None,
        cache: DecoderCache | None = None,
        **kwargs: Any,  # by this name transformers takes the arguments of forward() as well, such as Trainer's labels
    ) -> dict[str, Any]:
        """The arguments of the next ``forward``: the tokens that the cache has not read, or all where there is none."""
        inputs = named_cache({"past_key_values": past_key_values, "cache": cache})
        if inputs:
            inputs[CACHE].history, input_ids = input_ids, input_ids[:, inputs[CACHE].length :]
        else:
            inputs = {"encoder_outputs": encoder_outputs, "attention_mask": attention_mask, "use_cache": False}
        return {"decoder_input_ids": input_ids, "decoder_attention_mask": decoder_attention_mask, **inputs}

    def _prepare_generation_config(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_generation_config(*args, **kwargs)
        for name in ("num_beams", "num_return_sequences"):  # else a division by zero, somewhere
            if (value := getattr(prepared[0], name)) is not None:
                as_count(value, name, at_least=1)
        return prepared

    def _validate_model_kwargs(self, model_kwargs: dict[str, Any]) -> None:
        given = {name: model_kwargs.get(name) for name in _UNSUPPORTED}
        reject_unsupported(given | {"return_dict": model_kwargs.get("return_dict") is not None})
        if model_kwargs.get("encoder_outputs") is not None:
            as_encoded(model_kwargs["encoder_outputs"])
        if model_kwargs.get(CACHE) is not None:
            as_cache(model_kwargs[CACHE], self.backend)
        super()._validate_model_kwargs(model_kwargs)

    def _maybe_initialize_input_ids_for_generation(
        self, inputs: torch.Tensor | None = None, bos_token_id: Any = None, model_kwargs: Any = None
    ) -> torch.Tensor:
        encoded = (model_kwargs or {}).get("encoder_outputs")
        if inputs is None and encoded is not None:
            # Only their number is read. transformers makes them by the shape of hidden states, which a backend keeps.
            return torch.full((len(as_encoded(encoded).rows), 1), -100, device=self.device)
        return super()._maybe_initialize_input_ids_for_generation(inputs, bos_token_id, model_kwargs)

    def _expand_inputs_for_generation(
        self, expand_size: int = 1, *, encoder_outputs: EncodedBatch | None = None, **model_kwargs: Any
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        model_kwargs["is_encoder_decoder"] = False  # or it would look for hidden states to repeat
        input_ids, model_kwargs = super()._expand_inputs_for_generation(expand_size=expand_size, **model_kwargs)
        if encoder_outputs is not None:
            model_kwargs["encoder_outputs"] = as_encoded(encoder_outputs).repeated(expand_size)
        return input_ids, model_kwargs

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *_: Any, **__: Any
    ) -> None:
        reject_unsupported({name: getattr(generation_config, name, None) for name in _UNSUPPORTED_MODES})
        if generation_config.cache_implementation not in _CACHES:
            raise InputError(
                f"cache_implementation must be left out, got {generation_config.cache_implementation!r}: the backend "
                "has its own cache."
            )
        if model_kwargs.get(CACHE) is None and generation_config.use_cache is not False:
            encoded, mask = as_encoded(model_kwargs.get("encoder_outputs")), model_kwargs.get("attention_mask")
            cache = model_kwargs[CACHE] = encoded.start(self.backend, mask)
            cache.is_private = not generation_config.return_dict_in_generate

    def init_continuous_batching(self, *_: Any, **__: Any) -> None:
        raise InputError("Continuous batching needs transformers' own paged attention: give generate() a batch.")

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike[str],
        *,
        backend: Callable[..., Backend] | None = None,
        config: PretrainedConfig | None = None,
        generation_config: GenerationConfig | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        **options: Any,
    ) -> AcceleratedT5:
        """The model in the folder of an ONNX export.

        ``backend`` is the class that runs it, with ``options``: by default `OrtStatic` on a CPU, and `OrtPointers` if
        ``settings`` name another device. ``ModelUnavailableError`` without a ``config.json``.
        """
        folder = as_folder(folder)
        if backend is None:
            backend = export_backend(getattr(options.get("settings"), "device", "cpu"))
        running = backend(folder, **options)
        if config is None:
            if not (folder / "config.json").is_file():
                raise ModelUnavailableError(f"{folder} holds no config.json: export the model again.")
            config = load_pretrained(AutoConfig.from_pretrained, folder)
        if generation_config is None and (folder / "generation_config.json").is_file():
            generation_config = GenerationConfig.from_pretrained(folder)
        if tokenizer is None:
            tokenizer = load_tokenizer(folder)
        return cls(running, config, generation_config, tokenizer)

    @classmethod
    def around(cls, backend: Backend, **options: Any) -> AcceleratedT5:
        """The model that a backend runs, with its configuration and defaults; arguments as in `from_pretrained`."""
        if (model := getattr(backend, "model", None)) is not None:
            configs = {"config": model.config, "generation_config": model.generation_config}
            return cls(backend, **configs | options)
        return cls.from_pretrained(backend.folder, backend=lambda _: backend, **options)

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        *,
        push_to_hub: bool = False,
        **kwargs: Any,
    ) -> None:
        """Copy the export that the backend came from, with this model's configuration and defaults.

        The folder must be new or empty and outside the export; it appears whole or not at all. ``kwargs`` are those of
        `push_to_hub`, whose ``repo_id`` is the folder's name by default; sizes of weight files are ignored.
        ``InputError`` for a backend that came from no folder, and for arguments that would change what is saved.
        """
        upload = {name: kwargs.pop(name) for name in _UPLOAD if name in kwargs}
        reject_unsupported({name: value for name, value in kwargs.items() if name not in _SHARDING})
        if not is_main_process:
            return
        source, target = getattr(self.backend, "folder", None), Path(save_directory).absolute()
        if source is None:
            raise InputError(
                f"A {type(self.backend).__name__} came from no folder that could be copied. Save the model that it "
                "runs, or export that to ONNX."
            )
        if os.path.lexists(target) and (target.is_symlink() or not target.is_dir() or any(target.iterdir())):
            raise InputError(f"{target} exists and is no empty folder. Give a new one.")
        if Path(source).resolve() in target.resolve().parents:
            raise InputError(f"{target} lies inside {source}, the folder to copy. Give a folder elsewhere.")
        with locked(target), staged(target) as folder:
            # A folder that was downloaded holds other files, too, such as a model card.
            for name in (*read_manifest(source, verify=False).files, MANIFEST):
                shutil.copy2(Path(source, name), folder)
            # Checked before it is written again, or damage would get hashes that are right.
            manifest = read_manifest(folder)
            self.config.save_pretrained(folder)
            self.generation_config.save_pretrained(folder)
            asked = {"rules": constraints_from_config(self).to_json(), "tokens": special_tokens(self)}
            replace(manifest, **asked).write(folder)
            if target.exists():
                target.rmdir()  # fails if somebody has put a file there since
        if push_to_hub:
            self.push_to_hub(upload.pop("repo_id", target.name), **upload)

    def push_to_hub(self, repo_id: str, *args: Any, **options: Any) -> Any:
        """Upload what `save_pretrained` writes; arguments as in transformers."""
        if not args and "use_temp_dir" in signature(super().push_to_hub).parameters:
            # transformers 4.57 would save into a folder of the repository's name, if there is one.
            options.setdefault("use_temp_dir", True)
        return super().push_to_hub(repo_id, *args, **options)
