"""What clients may ask for, checked by pydantic, and the jobs that it becomes. Unknown fields are refused."""

from __future__ import annotations

import secrets
from html import escape
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from t5accel.decoding.distribution import Sampling
from t5accel.decoding.job import Job
from t5accel.decoding.rules import NONE, Rules
from t5accel.errors import InputError
from t5accel.serving.guard import Refused

_OPTIONS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class _Asked(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _first_mistakes(cls, given: Any) -> Any:
        """Refuse what a client can send 100,000 of: pydantic makes an error of each, for a second or more."""
        for name, value in given.items() if isinstance(given, dict) else ():
            if name not in cls.model_fields:
                name = name[:80]
                message = f"{name} is not supported: leave it out."
                raise Refused(400, message, param=name, code="unsupported_parameter")
            if isinstance(value, list) and not all(isinstance(item, str) for item in value):
                raise Refused(422, f"{name} must be a text or a list of texts, got other items.", param=name)
        return given

    def sampling(self) -> Sampling | None:
        """What the fields say that are named as those of a `Sampling`."""
        given = {name: getattr(self, name, None) for name in _OPTIONS}
        return Sampling(**{name: value for name, value in given.items() if value is not None})


class Generate(_Asked):
    """``POST /generate``."""

    text: str | list[str] = Field(description="One source with its prefix, or a list of them.")
    max_new_tokens: int = 64
    min_new_tokens: int | None = Field(None, description="By default what the model's generation_config says.")
    num_beams: int | None = Field(None, description="1: greedy search. By default the model's.")
    length_penalty: float | None = Field(None, description="Of beams. By default the model's.")
    early_stopping: bool | Literal["never"] | None = Field(None, description="Of beams. By default the model's.")
    num_return_sequences: int = Field(1, description="Answers to each text: of beams, or drawn.")
    do_sample: bool = Field(False, description="Draw tokens; the fields from temperature to seed are for that.")
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = Field(None, description="By default any; the answer says which.")
    stream: bool = Field(False, description="Server-sent events, of one text without beams.")
    truncate: bool = Field(False, description="Cut a source that is too long; by default it is refused.")
    priority: int = Field(0, description="The higher goes first, with a head start of 10 s at most.")
    deadline_s: float | None = Field(None, description="The answer is complete within so many seconds, or 504.")

    def job(self, ids: list[int], seed: int, deadline_s: float | None, rules: Rules = NONE) -> Job:
        """For one of its texts, with the model's rules where a field is left out.

        >>> Generate(text="a", num_beams=4).job([5, 1], seed=0, deadline_s=None).rows
        4
        >>> Generate(text="a").job([5, 1], seed=0, deadline_s=None, rules=Rules(num_beams=3)).rows
        3
        """
        useless = [name for name in (*_OPTIONS, "seed") if getattr(self, name) is not None and not self.do_sample]
        if useless:
            raise InputError(f"{', '.join(useless)} given without do_sample, and would do nothing.")
        beams = self.num_beams
        if beams is None:
            beams = 1 if self.do_sample else rules.num_beams
            if self.stream and beams > 1:
                raise InputError(
                    f"The model's generation_config sets num_beams={beams}, and beams cannot stream: give num_beams 1 "
                    "for greedy search."
                )
        same = ("max_new_tokens", "min_new_tokens", "length_penalty", "early_stopping", "num_return_sequences",
                "priority", "stream")  # fmt: skip
        return Job(
            ids, num_beams=beams, sampling=self.sampling() if self.do_sample else None, seed=seed,
            deadline_s=deadline_s if self.deadline_s is None else self.deadline_s,
            **{name: getattr(self, name) for name in same},
        )  # fmt: skip


class StreamOptions(_Asked):
    """Of a completion that streams."""

    include_usage: bool = False


class Completion(_Asked):
    """``POST /v1/completions``, as far as it fits a T5: the prompt is the encoder's source, and never echoed."""

    model: str
    prompt: str | list[str]
    max_tokens: int = 16
    temperature: float | None = Field(
        None, description="Left out or 0: the likeliest tokens, which differs from OpenAI's."
    )
    top_p: float | None = None
    n: int = 1
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    num_beams: int | None = Field(None, description="Not of OpenAI's. 1: greedy search. By default the model's.")
    priority: int = 0
    deadline_s: float | None = None

    def generate(self) -> Generate:
        """The same in our words."""
        if self.stream_options is not None and not self.stream:
            raise InputError("stream_options given without stream.")
        drawn = bool(self.temperature)
        if not drawn and (self.top_p is not None or self.n != 1):
            raise InputError("top_p and n need a temperature above 0: without one the likeliest tokens are taken.")
        drawing: dict[str, Any] = dict(temperature=self.temperature, top_p=self.top_p, seed=self.seed) if drawn else {}
        return Generate(
            text=self.prompt, max_new_tokens=self.max_tokens, num_beams=self.num_beams, do_sample=drawn,
            num_return_sequences=self.n, stream=self.stream, priority=self.priority,
            deadline_s=self.deadline_s, **drawing,
        )  # fmt: skip


def seed_of(asked: Generate) -> int:
    """The one that was given, or any.

    >>> seed_of(Generate(text="a", do_sample=True, seed=3))
    3
    """
    return secrets.randbelow(2**31) if asked.seed is None else asked.seed


def page(interface: dict[str, Any]) -> str:
    """An OpenAPI description as HTML that needs no script and nothing from another host.

    >>> page({"info": {"title": "T5 & co"}, "paths": {"/a": {"get": {"description": "Says a."}}}})[-70:]
    '<h1>T5 &amp; co</h1><p></p><h2>GET /a</h2><p>Says a.</p></body></html>'
    """
    title, about = escape(interface["info"]["title"]), escape(interface["info"].get("description", ""))
    parts = [f"<h1>{title}</h1><p>{about}</p>"]
    for path, operations in interface["paths"].items():
        for method, operation in operations.items():
            parts.append(f"<h2>{method.upper()} {escape(path)}</h2><p>{escape(operation.get('description', ''))}</p>")
            for content in operation.get("requestBody", {}).get("content", {}).values():
                parts.append("<table><tr><th>field</th><th>type</th><th>default</th><th></th></tr>")
                parts += [_line(name, field) for name, field in content["schema"]["properties"].items()]
                parts.append("</table>")
    style = "body{font:16px sans-serif;max-width:60em;margin:2em auto}td,th{text-align:left;padding:.2em 1em .2em 0}"
    head = f"<meta charset=utf-8><title>{title}</title><style>{style}</style>"
    return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(parts)}</body></html>"


def _line(name: str, field: dict[str, Any]) -> str:
    kinds = [repr(one["const"]) if "const" in one else one.get("type", "object") for one in field.get("anyOf", [field])]
    default = "required" if "default" not in field else "" if field["default"] is None else str(field["default"])
    cells = (name, " or ".join(kind for kind in kinds if kind != "null"), default, field.get("description", ""))
    return "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
