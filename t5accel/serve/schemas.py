"""Request schemas, and the jobs that requests become. Unknown fields are refused."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from t5accel.decoding.sampling import SamplingParams
from t5accel.decoding.token_constraints import NO_CONSTRAINTS, TokenConstraints
from t5accel.errors import InputError
from t5accel.serve.middleware import HTTPError
from t5accel.serve.request import GenerationRequest
from t5accel.serve.stops import MAX_STOP_CHARACTERS, MAX_STOPS

_OPTIONS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class _Asked(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    neutral: ClassVar[dict[str, Any]] = {}  # fields that are accepted at this value alone, where they change nothing

    @model_validator(mode="before")
    @classmethod
    def _first_mistakes(cls, given: Any) -> Any:
        """Refuse what a client can send 100,000 of: pydantic makes an error of each, for a second or more.

        A field of value null is a field left out, as in OpenAI's interface.
        """
        if not isinstance(given, dict):
            return given
        for name, value in given.items():
            if name not in cls.model_fields:
                name = name[:80]
                message = f"{name} is not supported: leave it out."
                raise HTTPError(400, message, param=name, code="unsupported_parameter")
            if value is not None and name in cls.neutral and value != (only := cls.neutral[name]):
                allowed = "null" if only is None else f"{json.dumps(only)} or null"
                message = f"{name} must be {allowed}, got {json.dumps(value)[:40]}. Leave it out."
                raise HTTPError(400, message, param=name, code="unsupported_parameter")
            if isinstance(value, list) and not all(isinstance(item, str) for item in value):
                message = f"{name} must be a text or a list of texts, got other items. Token ids are not supported."
                raise HTTPError(422, message, param=name)
        return {name: value for name, value in given.items() if value is not None}


class _Common(_Asked):
    """Fields of every route that generates. `Completion.generate` hands all of them on."""

    stop: str | list[str] | None = Field(
        None, description=f"Up to {MAX_STOPS} texts: the answer ends before the first of them. Not for beams."
    )
    prefix: str | None = Field(None, description="Text in front of every source. Default: the server's --prefix.")
    src_lang: str | None = Field(
        None, description="Language of the sources, as NLLB, mBART and M2M100 name it: eng_Latn, en_XX, en."
    )
    tgt_lang: str | None = Field(None, description="Language of the answers, likewise: fra_Latn, fr_XX, fr.")
    forced_bos_token: str | None = Field(None, description="Token that every answer begins with.")
    skip_special_tokens: bool = Field(True, description="Leave special tokens out of answers.")
    num_beams: int | None = Field(None, description="1: greedy search. Default: the model's.")
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = Field(None, description="Seed of the drawn tokens. Default: any.")
    stream: bool = Field(False, description="Server-sent events, without beams.")
    priority: int = Field(0, description="Higher values go first, with a head start of at most 10 s.")
    deadline_s: float | None = Field(
        None, description="Seconds within which the answer must be complete, else status 504."
    )

    @property
    def stops(self) -> list[str]:
        """The texts before which an answer ends.

        Raises:
            HTTPError: they are too many, too long or empty.
        """
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(given) > MAX_STOPS or not all(1 <= len(text) <= MAX_STOP_CHARACTERS for text in given):
            message = f"stop must be up to {MAX_STOPS} texts of 1 to {MAX_STOP_CHARACTERS} characters each."
            raise HTTPError(422, message, param="stop")
        return given

    def sampling(self) -> SamplingParams | None:
        """What the fields say that are named as those of a `SamplingParams`."""
        given = {name: getattr(self, name, None) for name in _OPTIONS}
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})


class Generate(_Common):
    """Generate answers to one or several texts, with every option of the engine."""

    text: str | list[str] = Field(description="One source with its prefix, or a list of them.")
    max_new_tokens: int = 64
    min_new_tokens: int | None = Field(None, description="Default: the value of the model's generation_config.")
    length_penalty: float | None = Field(None, description="For beams. Default: the model's.")
    early_stopping: bool | Literal["never"] | None = Field(None, description="For beams. Default: the model's.")
    num_return_sequences: int = Field(1, description="Answers per text: the best beams, or drawn answers.")
    do_sample: bool = Field(False, description="Draw tokens. temperature, top_k, top_p, min_p, seed need it.")
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    truncate: bool = Field(False, description="Cut a source that is too long. Default: refuse it.")

    def job(
        self,
        ids: list[int],
        seed: int,
        deadline_s: float | None,
        rules: TokenConstraints = NO_CONSTRAINTS,
        stopping_criterion: Callable[[Sequence[int]], bool] | None = None,
    ) -> GenerationRequest:
        """For one of its texts, with the model's rules where a field is left out.

        >>> Generate(text="a", num_beams=4).job([5, 1], seed=0, deadline_s=None).rows
        4
        >>> Generate(text="a").job([5, 1], seed=0, deadline_s=None, rules=TokenConstraints(num_beams=3)).rows
        3
        """
        useless = [name for name in (*_OPTIONS, "seed") if getattr(self, name) is not None and not self.do_sample]
        if useless:
            raise InputError(f"{', '.join(useless)} given without do_sample, and would do nothing.")
        beams = self.num_beams
        if beams is None:
            beams = 1 if self.do_sample else rules.num_beams
            if beams > 1 and (self.stream or stopping_criterion):
                raise InputError(
                    f"The model's generation_config sets num_beams={beams}, and beams can neither stream nor stop at "
                    "texts: give num_beams 1 for greedy search."
                )
        same = (
            "max_new_tokens",
            "min_new_tokens",
            "length_penalty",
            "early_stopping",
            "num_return_sequences",
            "priority",
            "stream",
        )
        return GenerationRequest(
            ids,
            num_beams=beams,
            sampling=self.sampling() if self.do_sample else None,
            seed=seed,
            deadline_s=deadline_s if self.deadline_s is None else self.deadline_s,
            stopping_criterion=stopping_criterion,
            **{name: getattr(self, name) for name in same},
        )


class StreamOptions(_Asked):
    """Options of a completion that streams."""

    neutral = {"include_obfuscation": False}

    include_usage: bool = False
    include_obfuscation: bool | None = Field(None, description="Only false.")


class Completion(_Common):
    """Complete one or several prompts, for OpenAI's clients. The prompt is the encoder's source, and never echoed."""

    neutral = {
        "frequency_penalty": 0,
        "presence_penalty": 0,
        "echo": False,
        "logprobs": None,
        "logit_bias": {},
        "suffix": "",
    }

    model: str
    prompt: str | list[str] = Field(description="One source with its prefix, or a list of them.")
    max_tokens: int | None = 16
    temperature: float | None = Field(
        None, description="Left out or 0: the likeliest tokens, which differs from OpenAI's default."
    )
    top_p: float | None = Field(None, description="Without a temperature above 0 only 1.")
    n: int | None = Field(1, description="Answers per prompt. More than 1 need a temperature above 0.")
    best_of: int | None = Field(None, description="Only the value of n.")
    stream: bool | None = Field(False, description="Server-sent events, without beams.")
    stream_options: StreamOptions | None = None
    frequency_penalty: float | None = Field(None, description="Only 0.")
    presence_penalty: float | None = Field(None, description="Only 0.")
    echo: bool | None = Field(None, description="Only false.")
    logprobs: int | None = Field(None, description="Only null.")
    logit_bias: dict[str, float] | None = Field(None, description="Only an empty object.")
    suffix: str | None = Field(None, description="Only an empty text.")
    user: str | None = Field(None, description="Ignored.")
    num_beams: int | None = Field(None, description="Not one of OpenAI's. 1: greedy search. Default: the model's.")

    def generate(self) -> Generate:
        """The same in our words."""
        if self.stream_options is not None and not self.stream:
            raise InputError("stream_options given without stream.")
        if self.best_of not in (None, self.n):
            message = f"best_of must be n, {self.n}, or null, got {self.best_of}. Leave it out."
            raise HTTPError(400, message, param="best_of", code="unsupported_parameter")
        drawn = bool(self.temperature)
        if not drawn and (self.top_p not in (None, 1) or self.n != 1):
            raise InputError("top_p and n need a temperature above 0: without one the likeliest tokens are taken.")
        common = {name: getattr(self, name) for name in _Common.model_fields}
        if not drawn:
            common |= {"temperature": None, "top_p": None, "seed": None}
        return Generate(
            text=self.prompt, max_new_tokens=self.max_tokens, do_sample=drawn, num_return_sequences=self.n, **common
        )


def seed_of(asked: Generate) -> int:
    """The one that was given, or any.

    >>> seed_of(Generate(text="a", do_sample=True, seed=3))
    3
    """
    return secrets.randbelow(2**31) if asked.seed is None else asked.seed
