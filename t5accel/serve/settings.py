"""Settings of the server, from flags or ``T5ACCEL_…`` environment variables."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from t5accel.errors import InputError
from t5accel.serve.monitoring import Form, Level

PREFIX = "T5ACCEL_"
OF_ONE = {  # settings that apply only with a value of another one, which would else be left aside silently
    ("task", "embed"): ["pooling", "normalize", "batch_tokens"],
    ("task", "generate"): "device engine address replicas replicas_min max_batch_rows key_value_mb max_queued_tokens "
    "max_beams max_new_tokens max_prefill_stall_ms prefill_share encoder_cache_mb".split(),
    ("engine", "ray"): ["address", "replicas", "replicas_min"],
    ("device", "cpu"): ["encoder_cache_mb"],  # on cuda sources are encoded anew
}
EMBED_PRECISIONS = ("fp32", "bf16", "fp16", "int8", "int4", "auto")
Lower = BeforeValidator(str.lower)
OTHERS = {"CACHE", "TRACEBACK", "COMMIT"}  # variables of other parts


class Settings(BaseSettings):
    """One field for each flag: ``--max-prefill-stall-ms 20`` is ``T5ACCEL_MAX_PREFILL_STALL_MS=20``. A flag wins.

    >>> Settings(model="/models/translator").public_name
    'translator'
    """

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_ignore_empty=True, allow_inf_nan=False)

    task: Literal["generate", "embed"] = Field(
        "generate", description="generate, or embed: embeddings of texts by the model's encoder alone."
    )
    model: str = Field("mini", description="mini, mini-d1, mini-d1p, a folder, or a hub id.")
    precision: str | None = Field(
        None,
        description="fp32, fp16, bf16, int8, int8-per-token or int4; on a GPU one of the first three; with task embed "
        "also auto, and no int8-per-token. Default: fp32; an export's own.",
    )
    device: Literal["cpu", "cuda"] = Field("cpu", description="cpu, or cuda: the first GPU, by PyTorch.")
    prefix: str = Field("", description="Text in front of every source whose request has no prefix field.")
    threads: int | None = Field(None, ge=1, description="Threads of the engine. Default: all cores of this process.")
    served_model_name: str | None = Field(None, description="Model's name for clients. Default: that of its folder.")
    host: str = Field("127.0.0.1", description="Address to listen at. Any but this machine's needs T5ACCEL_API_KEY.")
    allow_unauthenticated: bool = Field(False, description="Serve other machines without an API key.")
    allowed_hosts: str = Field("", description="Further Host headers, separated by commas; *: any.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen at; 0: any free port.")
    max_batch_rows: int = Field(32, ge=1, description="Maximum rows in the running batch: 1 per answer, K of K beams.")
    key_value_mb: int | None = Field(None, ge=1, description="Maximum megabytes of the KV cache. Default: no limit.")
    max_queue: int = Field(256, ge=1, description="Maximum requests in the queue.")
    max_queued_tokens: int | None = Field(
        None,
        ge=1,
        description="Maximum source and new tokens, times rows, in the queue. Default: of max_queue longest requests.",
    )
    max_beams: int = Field(8, ge=1, description="Maximum beams, or drawn answers, per text.")
    max_source_tokens: int = Field(512, ge=1, description="Maximum tokens of a source.")
    max_new_tokens: int = Field(512, ge=1, description="Maximum tokens of an answer.")
    max_texts: int = Field(64, ge=1, description="Maximum texts per request.")
    pooling: Literal["mean", "first"] = Field("mean", description="With task embed: mean of a text's tokens, or first.")
    normalize: bool = Field(False, description="With task embed: scale embeddings to length 1.")
    batch_tokens: int = Field(2048, ge=1, description="With task embed: maximum padded tokens computed at once.")
    max_prefill_stall_ms: float = Field(
        50.0, ge=0, description="Maximum milliseconds that running answers wait while new sources are encoded."
    )
    prefill_share: float = Field(1.0, gt=0, le=1, description="Share of the time for new requests while others run.")
    encoder_cache_mb: int = Field(256, ge=0, description="Megabytes of encoder outputs kept for repeated sources.")
    connections: int = Field(1000, ge=1, description="Maximum open connections.")
    body_kb: int = Field(1024, ge=1, description="Maximum kilobytes of a request's body.")
    header_timeout_s: float = Field(10.0, gt=0, description="Seconds within which a request's head must arrive.")
    body_timeout_s: float = Field(10.0, gt=0, description="Seconds within which a request's body must arrive.")
    write_timeout_s: float = Field(10.0, gt=0, description="Seconds after which a client that hardly reads is cut off.")
    deadline_s: float = Field(120.0, gt=0, lt=1e9, description="Deadline in seconds of requests that set none.")
    shutdown_grace_s: float = Field(30.0, ge=0, description="Seconds for running requests to finish after SIGTERM.")
    unhealthy_after_s: float = Field(60.0, gt=0, description="Seconds of one step after which health says 503.")
    api_key: SecretStr | None = Field(None, description="By the environment only: T5ACCEL_API_KEY.")
    engine: Literal["local", "ray"] = Field("local", description="local, or ray: replicas of the model.")
    address: str | None = Field(None, description="Address of a Ray cluster, for engine ray. Default: one made here.")
    replicas: int = Field(2, ge=1, description="Maximum replicas with engine ray; more start as requests wait.")
    replicas_min: int = Field(1, ge=1, description="Minimum replicas with engine ray.")
    log_texts: bool = Field(False, description="Write texts and answers to the log.")
    log_level: Annotated[Level, Lower] = Field(
        "info", description="debug, info, warning, error or critical; debug also logs probes."
    )
    log_format: Annotated[Form, Lower] = Field("text", description="text, or json: one object per line.")

    @property
    def public_name(self) -> str:
        """The model's name for clients, without the path of a folder."""
        is_path = Path(self.model).exists() or Path(self.model).is_absolute()
        return self.served_model_name or (os.path.basename(os.path.abspath(self.model)) if is_path else self.model)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def refuse_misspelt(environment: Mapping[str, str]) -> None:
    """Raise ``InputError`` for a misspelt setting, which would silently change nothing."""
    known = {name.upper() for name in Settings.model_fields} | OTHERS
    for name in sorted(environment):
        last = name.upper().removeprefix(PREFIX)
        if name.upper().startswith(PREFIX) and last not in known:
            # An orchestrator may set others, such as T5ACCEL_SERVICE_HOST beside a service of that name.
            for near in get_close_matches(last, sorted(known), n=1, cutoff=0.7):
                raise InputError(f"{name} is no setting. Rename it to {PREFIX}{near}, or unset it.")
