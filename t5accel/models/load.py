"""Load a model by name."""

# At a forced output length speed does not depend on the weights' values, so random ones are enough to measure it.

from __future__ import annotations

import copy
import os
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from t5accel.checks import check_file, read_json_object
from t5accel.errors import (
    InputError,
    MissingPackageError,
    ModelUnavailableError,
    NotT5Error,
    T5AccelError,
    UnknownModelError,
    install,
)
from t5accel.models.families import NEAREST, SIZES, family_of, gemma_configs, no_head, require_class
from t5accel.models.pruned import load_pruned
from t5accel.models.random_init import RANDOM_SIZES, kind_of, random_model, random_t5
from t5accel.models.sizes import CLASS_PREFIXES, MAX_LAYERS
from t5accel.models.stored_weights import COMPUTED, check_loaded

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

BUNDLED = {"mini": "mini-t5", "mini-d1": "mini-t5-d1", "mini-d1p": "mini-t5-d1p"}
# Short names under which the originals are widely known.
HUB_ALIASES = {f"t5-{size}": f"google-t5/t5-{size}" for size in ("small", "base", "large", "3b", "11b")}
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
_WEIGHTS = ("model*.safetensors*", "pytorch_model*.bin*")  # whole, or in shards with an index
# Files of which a tokenizer of these families can be made; ByT5's has the second one alone.
_TOKENIZERS = (("tokenizer.json",), ("tokenizer_config.json",), ("spiece.model",), ("sentencepiece.bpe.model",),
               ("tokenizer.model",), ("source.spm",), ("vocab.json", "merges.txt"))  # fmt: skip
_EXPORT = "manifest.json"  # of an export: `graphs.contract.MANIFEST`
# What a folder holds in place of a model, or beside one.
_INSTEAD = {
    "adapter_config.json": "{} holds an adapter: load it with peft, merge it into its model with merge_and_unload(), "
    "save that with save_pretrained(), and give that folder.",
    _EXPORT: "{} is an export, which holds no weights for PyTorch: give the model that it was made from.",
}
_HEADLESS = re.compile(r"\w+For(?!Conditional)\w+|\w+EncoderModel")  # classes without a language-model head


def data_folder() -> Path:
    """Folder of the bundled models and evaluation sets: in the package (wheel) or beside it (checkout).

    Raises ``ModelUnavailableError`` if neither exists.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "data", package.parent / "data"):
        if (folder / BUNDLED["mini"]).is_dir():
            return folder
    raise ModelUnavailableError(
        f"No data folder at {package / 'data'} or {package.parent / 'data'}: install the t5accel wheel, run from a "
        "checkout, or load a model from a folder of yours."
    )


def require_torch(what: str, instead: str = "", packages: Sequence[str] = ("torch", "transformers")) -> None:
    """Raise ``MissingPackageError`` where PyTorch or transformers is not installed, as with the extra ``runtime``."""
    for package in packages:
        try:
            import_module(package)
        except ModuleNotFoundError:
            raise MissingPackageError(f"{what} needs {package}: {install('cpu')}. {instead}".rstrip()) from None


def require_gpu() -> None:
    """Raise ``MissingPackageError`` unless torch sees a GPU."""
    require_torch("device='cuda'")
    import torch

    if not torch.cuda.is_available():
        raise MissingPackageError("device='cuda' needs a GPU and a torch that sees it: give device='cpu' here.")


def load_model(name: str | os.PathLike[str], *, seed: int = 0) -> tuple[PreTrainedModel, Any]:
    """Load an fp32 model in evaluation mode, and its tokenizer (``None`` for random weights).

    ``name`` is ``"mini"`` (bundled), ``"random:SIZE"`` with a size of ``RANDOM_SIZES`` or ``SIZES`` (seeded, offline),
    a folder written by ``save_pretrained``, or a hub id such as ``"google-t5/t5-small"``. Raises ``UnknownModelError``,
    ``ModelUnavailableError`` if the hub or the folder lacks the model, ``NotT5Error`` for another kind of checkpoint.

    >>> model, tokenizer = load_model("random:t5-small")
    >>> model.config.d_model, tokenizer
    (512, None)
    """
    text = os.fspath(name) if isinstance(name, os.PathLike) else name
    if not isinstance(text, str) or not text:
        raise UnknownModelError(f"model must be named by a non-empty text, got {name!r}. {known_model_names()}")
    require_torch("load_model()")
    if text in BUNDLED:
        return _load_folder(data_folder() / BUNDLED[text])
    if text.startswith("random:"):
        size = text.removeprefix("random:")
        if size in SIZES:
            return random_model(*SIZES[size], seed=seed), None
        if size not in RANDOM_SIZES:
            raise UnknownModelError(f"No random size {size!r}. {known_model_names()}")
        return random_t5(RANDOM_SIZES[size], seed=seed, kind=kind_of(size)), None
    if os.path.isdir(text):  # unlike Path.is_dir(), it answers False to a name that is too long
        return _load_folder(Path(text))
    if repository := hub_id(text):
        return _load_hub(repository)
    kinds = "not bundled, not random, not a folder, not a hub id"
    raise UnknownModelError(f"No model {text!r}: {kinds}. {known_model_names()}")


def hub_id(name: str) -> str | None:
    """The hub repository of a name; ``None`` for a bundled or random model, or a folder."""
    full = HUB_ALIASES.get(name, name)
    return full if _HUB_ID.fullmatch(full) and not os.path.isdir(name) else None


def hub_snapshot(name: str) -> Path | None:
    """The folder in the hub's cache of a hub id's current commit, if it was downloaded; uses no network."""
    repository = hub_id(name)
    snapshot = repository and _hub_commit(repository)
    return snapshot if snapshot and (snapshot / "config.json").is_file() else None


def _hub_commit(repository: str) -> Path | None:
    """The cache folder of a repository's current commit."""
    from huggingface_hub import constants

    kept = Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"
    try:
        return kept / "snapshots" / (kept / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None


def cast_model(model: PreTrainedModel, floats: str, device: str = "cpu") -> PreTrainedModel:
    """Copy a model to a device in ``"float32"``, ``"bfloat16"`` or ``"float16"``."""
    import torch

    moved = copy.deepcopy(model).to(device, getattr(torch, floats))
    # In fp16 a T5's wo stays in fp32, as transformers keeps it: its outputs overflow in published models.
    if floats == "float16" and model.config.model_type in CLASS_PREFIXES:
        for part in (part for name, part in moved.named_modules() if name.endswith(".wo")):
            part.float()
    return moved


def _load_folder(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    refuse_instead(folder, str(folder))
    _refuse_kind(folder, str(folder))
    return _from_pretrained(str(folder))


def refuse_instead(folder: Path, name: str) -> None:
    """Raise ``ModelUnavailableError`` for an adapter, also beside weights, or an export in the folder of a name."""
    repository = hub_id(name)  # of which not every file may be here
    for file, sentence in _INSTEAD.items():
        is_model = file == _EXPORT and has_weights(folder)
        if not is_model and ((folder / file).is_file() or repository and hub_file(repository, file, folder.name)):
            raise ModelUnavailableError(sentence.format(name))


def _refuse_kind(folder: Path, where: str) -> None:
    """Refuse a kind of model that this transformers, or t5accel, does not know, before its class is looked for."""
    advice = "Give a folder written by save_pretrained()."
    kind = str(read_json_object(folder / "config.json", ModelUnavailableError, advice).get("model_type"))
    require_class(kind, where)
    if kind in NEAREST:
        family_of(SimpleNamespace(model_type=kind, is_encoder_decoder=True), where)


def _load_hub(repository: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    try:
        loaded = _from_pretrained(repository, local_files_only=not hub_resolves())
    except T5AccelError:
        raise
    except OSError as error:
        _refuse_instead(repository)
        raise ModelUnavailableError(
            f"{repository!r} is no folder here, and could not be had from the model hub (no network, or no such "
            "model). Offline, load_model('mini') and load_model('random:t5-small') work, as do cached models."
        ) from error
    except Exception as error:  # reached, and broken or too new for the installed transformers
        _refuse_instead(repository)
        raise ModelUnavailableError(f"{repository!r} cannot be loaded: {error}") from error
    _refuse_instead(repository)
    return loaded


def _refuse_instead(repository: str) -> None:
    if commit := _hub_commit(repository):  # the hub has answered
        refuse_instead(commit, repository)
    if snapshot := hub_snapshot(repository):
        _refuse_kind(snapshot, repository)


def hub_file(repository: str, name: str, revision: str | None = None) -> Path | None:
    """A file of a hub repository, downloaded if needed; ``None`` if unavailable."""
    if not hub_resolves():
        return None
    from huggingface_hub import constants, hf_hub_download

    try:
        return Path(hf_hub_download(repository, name, cache_dir=constants.HF_HUB_CACHE, revision=revision))
    except Exception:  # whatever the reason: loading the model says it, or there is no such file
        return None


def hub_resolves() -> bool:
    """Whether the hub may be asked, and its address is known here."""
    # Without a network the hub's client retries for half a minute and logs each try: ask for its address first.
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    if getproxies().keys() - {"no"}:
        return True
    try:
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, 443)
    except OSError:
        return False
    return True


def load_pretrained(from_pretrained: Callable[..., Any], where: str | os.PathLike[str], **options: Any) -> Any:
    """Call a ``from_pretrained`` of transformers' ``Auto`` classes without running code from the folder or hub id.

    Raises ``ModelUnavailableError`` if the folder is damaged or brings code that transformers would run.
    """
    # transformers 4.57 takes what lies in a folder for trusted, and runs it without being allowed to.
    if os.path.lexists(os.path.join(where, "custom_generate")):
        raise ModelUnavailableError(
            f"{where} holds custom_generate, Python code that transformers runs as it loads the model. Read it, and "
            "remove it from the folder: t5accel runs no code that lies beside weights."
        )
    for path in Path(where).iterdir() if os.path.isdir(where) else ():
        if path.exists() and not path.is_dir():
            check_file(path, ModelUnavailableError)
    try:
        # Left open, transformers asks on the terminal, and takes a line of piped input for the answer.
        return from_pretrained(os.fspath(where), trust_remote_code=False, **options)
    except (T5AccelError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the tokenizers library is no Exception
        if "trust_remote_code" in str(error):  # transformers' advice, which nobody can follow here
            raise ModelUnavailableError(
                f"{where} cannot be loaded without running Python code that comes with it, which t5accel never does. "
                "Give a model whose classes are in transformers."
            ) from error
        if not os.path.isdir(where):
            raise
        raise ModelUnavailableError(f"{where} cannot be loaded: {error}") from error


def _from_pretrained(where: str, **options: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    import torch
    import transformers
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    config = load_pretrained(AutoConfig.from_pretrained, where, **options)
    family, configs = family_of(config, where), [config]
    configs += gemma_configs(config).values() if family.is_gemma else ()
    if os.path.isdir(where) and not has_weights(Path(where)):
        raise ModelUnavailableError(
            f"{where} holds no weights for PyTorch, neither model.safetensors nor pytorch_model.bin. Give a folder "
            "written by save_pretrained() of a PyTorch model; weights of TensorFlow and Flax are not read."
        )
    for name, value in (entry for one in configs for entry in vars(one).items()):
        # building layers without end would never come to the weights
        if name.endswith("layers") and isinstance(value, int) and value > MAX_LAYERS:
            raise ModelUnavailableError(f"{where}: {name} must be at most {MAX_LAYERS}, got {value}.")
    attention = getattr(config, "_attn_implementation", None)
    if isinstance(attention, str) and "/" in attention:  # compiled code of a hub's repository
        raise ModelUnavailableError(f"{where} asks for the kernel {attention!r}: remove it from its config.json.")
    load = AutoModelForSeq2SeqLM.from_pretrained
    if getattr(config, "layer_widths", None):
        name = f"{CLASS_PREFIXES[config.model_type]}ForConditionalGeneration"
        load = partial(load_pruned, getattr(transformers, name))
    if family.has_soft_caps:  # torch's attention leaves out soft caps, in transformers 4.57 without a word
        load = partial(load, attn_implementation="eager")
    with _no_loading_bar():
        model, report = load_pretrained(load, where, dtype=torch.float32, output_loading_info=True, **options)
    missing, unread = (sorted(report[f"{kind}_keys"]) for kind in ("missing", "unexpected"))
    missing += [name for name, weight in model.named_parameters() if weight.is_meta]  # that 4.57 says nothing of
    if (missing or unread) and (kind := _HEADLESS.search(str(config.architectures))):
        raise NotT5Error(no_head(f"{where}, a {kind[0]},", config))
    if missing:  # transformers fills them with random numbers and goes on
        raise ModelUnavailableError(f"{where} is incomplete: it lacks {len(missing)} weights, such as {missing[0]}.")
    if unread := [name for name in unread if not name.endswith(COMPUTED)]:  # and drops these
        raise ModelUnavailableError(
            f"{where} holds {len(unread)} weights that a {type(model).__name__} does not have, such as {unread[0]}: "
            "merge adapters into the model first, or save it without them."
        )
    check_loaded(model, Path(where) if os.path.isdir(where) else hub_snapshot(where), where)
    tokenizer = load_tokenizer(where, **options)
    return model.eval(), tokenizer


def has_weights(folder: Path) -> bool:
    """Whether a folder has weights for PyTorch."""
    return any(path for pattern in _WEIGHTS for path in folder.glob(pattern))


def require_tokenizer(name: str | os.PathLike[str]) -> None:
    """Raise ``InputError`` for a local model without a tokenizer, before it is loaded or exported."""
    name = os.fspath(name)
    if name.removeprefix("random:") in {*RANDOM_SIZES, *SIZES} - {name}:
        raise InputError(f"{name} has random weights and no tokenizer, so it reads no text: give another model.")
    is_model = name not in BUNDLED and os.path.isfile(os.path.join(name, "config.json"))
    if is_model and not has_tokenizer(Path(name)):
        raise InputError(f"{name} has no tokenizer: save one there with tokenizer.save_pretrained().")


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has the files of a tokenizer."""
    if any(all((folder / name).is_file() for name in files) for files in _TOKENIZERS):
        return True
    config = folder / "config.json"
    named = config.is_file() and read_json_object(config, ModelUnavailableError).get("tokenizer_class")
    return named == "ByT5Tokenizer" or bool(named and (folder / "vocab.txt").is_file())


def load_tokenizer(where: str | os.PathLike[str], **options: Any) -> PreTrainedTokenizerBase | None:
    """Load transformers' tokenizer of a folder or hub id; ``None`` for a folder without its files.

    Raises ``ModelUnavailableError`` if its files are damaged or its vocabulary is missing.
    """
    folder = Path(where) if os.path.isdir(where) else hub_snapshot(os.fspath(where))
    if os.path.isdir(where) and not has_tokenizer(folder):
        return None
    require_torch(f"The tokenizer of {where}", packages=["transformers"])
    from transformers import AutoTokenizer

    tokenizer = load_pretrained(AutoTokenizer.from_pretrained, where, **options)
    names = set(tokenizer.vocab_files_names.values()) - {"tokenizer_config.json"}
    if names and folder and not any((folder / name).is_file() for name in names | {"tokenizer.model"}):
        # transformers 5 makes one with an empty vocabulary, for which every word is unknown.
        raise ModelUnavailableError(
            f"{where} lacks the vocabulary of its {type(tokenizer).__name__}, {' or '.join(sorted(names))}. Save the "
            "tokenizer there with tokenizer.save_pretrained(), or name its class in tokenizer_config.json."
        )
    return tokenizer


@contextmanager
def _no_loading_bar() -> Iterator[None]:
    # transformers 5 draws a bar for every model, also for one that is there in a blink.
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def known_model_names() -> str:
    """A sentence for errors that lists the valid model names."""
    names = ", ".join(map(repr, [*BUNDLED, *(f"random:{size}" for size in (*RANDOM_SIZES, *SIZES))]))
    return f"Allowed: {names}; a folder written by save_pretrained(); a hub id such as 'google-t5/t5-small'."
