"""What the server can be told: by flags of ``t5accel serve``, by ``T5ACCEL_…`` in the environment, or as defaults."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from t5accel.serving.budget import Limits


class Settings(BaseSettings):
    """One field for each flag: ``--stall-ms 20`` is ``T5ACCEL_STALL_MS=20``. A flag wins.

    >>> Settings(rows=8).limits.rows
    8
    """

    model_config = SettingsConfigDict(env_prefix="T5ACCEL_", env_ignore_empty=True)

    model: str = Field("mini", description="mini, mini-d1, mini-d1p, a folder, or a hub id.")
    precision: str = Field("fp32", description="fp32, fp16, int8 or int4.")
    threads: int | None = Field(None, ge=1, description="Of the engine. Default: all cores that this process may use.")
    host: str = Field("127.0.0.1", description="0.0.0.0: reachable from other machines; then set an API key.")
    port: int = Field(8000, ge=0, le=65535, description="0: any that is free.")
    rows: int = Field(32, ge=1, description="Of the batch: a greedy answer takes one, K beams take K.")
    key_value_mb: int | None = Field(None, ge=1, description="Of the keys and values of all rows. Default: no limit.")
    queue: int = Field(256, ge=1, description="Requests that may wait.")
    source_tokens: int = Field(512, ge=1, description="Of a source, at most.")
    new_tokens: int = Field(512, ge=1, description="Of an answer, at most.")
    texts: int = Field(64, ge=1, description="Of one request, at most.")
    stall_ms: float = Field(50.0, ge=0, description="Running answers wait so long at most while newcomers are encoded.")
    join_share: float = Field(0.25, gt=0, le=1, description="Of the time, at most, for newcomers while others run.")
    encoder_cache_mb: int = Field(256, ge=0, description="For encoder outputs that are used again.")
    connections: int = Field(1000, ge=1, description="Open at a time.")
    body_kb: int = Field(1024, ge=1, description="Of a request, at most.")
    head_s: float = Field(10.0, gt=0, description="For the head of a request to arrive.")
    body_s: float = Field(10.0, gt=0, description="For its body.")
    write_s: float = Field(10.0, gt=0, description="A client that lets an answer lie unread for so long is cut off.")
    deadline_s: float | None = Field(None, gt=0, description="Of requests that name none. Default: none.")
    grace_s: float = Field(30.0, ge=0, description="After SIGTERM, for what is running.")
    stuck_s: float = Field(60.0, gt=0, description="One step longer than that, and the server is not alive.")
    api_key: SecretStr | None = Field(None, description="By the environment only: T5ACCEL_API_KEY.")
    engine: Literal["local", "ray"] = Field("local", description="ray: replicas of the model behind this process.")
    address: str | None = Field(None, description="Of a cluster of Ray. Default: one on this machine.")
    replicas: int = Field(2, ge=1, description="Of ray, at most: one more when more run than a batch has rows.")
    replicas_min: int = Field(1, ge=1, description="Of ray, at least.")
    log_texts: bool = Field(False, description="Write texts and answers to the log.")

    @property
    def limits(self) -> Limits:
        """The scheduler's."""
        most = self.key_value_mb
        return Limits(
            rows=self.rows, key_value_bytes=None if most is None else most * 10**6, queue=self.queue,
            source_tokens=self.source_tokens, new_tokens=self.new_tokens, stall_s=self.stall_ms / 1e3,
            join_share=self.join_share, encoder_cache_bytes=self.encoder_cache_mb * 10**6,
        )  # fmt: skip
