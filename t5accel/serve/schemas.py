"""Request and response schemas, and the OpenAPI description of the routes."""

# Unknown fields of requests are refused; responses are not validated.

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from html import escape
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from t5accel.decoding.sampling import SamplingParams
from t5accel.decoding.token_constraints import NO_CONSTRAINTS, TokenConstraints
from t5accel.errors import InputError
from t5accel.serve.middleware import HTTPError
from t5accel.serve.request import GenerationRequest

MAX_STOPS, MAX_STOP_CHARACTERS = 4, 256
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_HANDED_ON = """
max_new_tokens min_new_tokens length_penalty early_stopping num_return_sequences priority stream
""".split()


class Asked(BaseModel):
    """A request's body; unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    neutral: ClassVar[dict[str, Any]] = {}  # fields that are accepted at this value alone, where they change nothing

    @model_validator(mode="before")
    @classmethod
    def _first_mistakes(cls, given: Any) -> Any:
        # Mistakes of which a client can send 100,000: pydantic makes an error of each, for a second or more.
        if not isinstance(given, dict):
            return given
        for name, value in given.items():
            if name not in cls.model_fields:
                name = name[:80]
                raise unsupported(name, f"{name} is not supported: leave it out.")
            if value is not None and name in cls.neutral and value != (only := cls.neutral[name]):
                allowed = "null" if only is None else f"{json.dumps(only)} or null"
                raise unsupported(name, f"{name} must be {allowed}, got {json.dumps(value)[:40]}. Leave it out.")
            if isinstance(value, list) and not all(isinstance(item, str) for item in value):
                message = f"{name} must be a text or a list of texts, got other items. Token ids are not supported."
                raise HTTPError(422, message, param=name)
        # A field of value null is a field left out, as in OpenAI's interface.
        return {name: value for name, value in given.items() if value is not None}


def unsupported(name: str, message: str) -> HTTPError:
    """The refusal of a field, or of its value."""
    return HTTPError(400, message, param=name, code="unsupported_parameter")


class _Common(Asked):
    """Fields of every route that generates."""

    stop: str | list[str] | None = Field(
        None, description=f"Up to {MAX_STOPS} texts: the answer ends before the first of them. Not for beams."
    )
    prefix: str | None = Field(None, description="Text in front of every source. Default: the server's --prefix.")
    src_lang: str | None = Field(None, description="Language of sources: eng_Latn (NLLB), en_XX (mBART), en (M2M100).")
    tgt_lang: str | None = Field(None, description="Language of the answers, likewise: fra_Latn, fr_XX, fr.")
    forced_bos_token: str | None = Field(None, description="Token that every answer begins with.")
    skip_special_tokens: bool = Field(True, description="Leave special tokens out of answers.")
    num_beams: int | None = Field(None, description="1: greedy search. Default: the model's.")
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = Field(None, description="Seed of the drawn tokens. Default: any.")
    stream: bool = Field(False, description="Server-sent events, without beams.")
    priority: int = Field(0, description="Higher values go first, with a head start of at most 10 s.")
    deadline_s: float | None = Field(None, description="Seconds until the answer must be complete, else status 504.")

    @property
    def stops(self) -> list[str]:
        """The stop strings; ``HTTPError``: too many, too long or empty ones."""
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(given) > MAX_STOPS or not all(1 <= len(text) <= MAX_STOP_CHARACTERS for text in given):
            message = f"stop must be up to {MAX_STOPS} texts of 1 to {MAX_STOP_CHARACTERS} characters each."
            raise HTTPError(422, message, param="stop")
        return given


class Generate(_Common):
    """Generate answers to one or several texts, with every option of the engine."""

    text: str | list[str] = Field(description="One source with its prefix, or a list of them.")
    max_new_tokens: int | None = Field(None, description="Default: 64, or what server and model allow.")
    min_new_tokens: int | None = Field(None, description="Default: the value of the model's generation_config.")
    length_penalty: float | None = Field(None, description="For beams. Default: the model's.")
    early_stopping: bool | Literal["never"] | None = Field(None, description="For beams. Default: the model's.")
    num_return_sequences: int = Field(1, description="Answers per text: the best beams, or drawn answers.")
    do_sample: bool = Field(False, description="Draw tokens. temperature, top_k, top_p, min_p, seed need it.")
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    truncate: bool = Field(False, description="Cut a source that is too long. Default: refuse it.")

    def to_request(
        self,
        ids: list[int],
        deadline_s: float | None,
        rules: TokenConstraints = NO_CONSTRAINTS,
        stopping_criterion: Callable[[Sequence[int]], bool] | None = None,
        **options: Any,
    ) -> GenerationRequest:
        """The request of one text; the model's rules are the defaults.

        >>> Generate(text="a").to_request([5, 1], deadline_s=None, rules=TokenConstraints(num_beams=3)).rows
        3
        """
        useless = [name for name in (*_SAMPLING, "seed") if getattr(self, name) is not None and not self.do_sample]
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
        useless = [name for name in ("length_penalty", "early_stopping") if getattr(self, name) is not None]
        if useless and beams == 1:
            raise InputError(f"{', '.join(useless)} given without beams, and would do nothing.")
        sampling = self.model_dump(include={*_SAMPLING}, exclude_none=True)
        return GenerationRequest(
            ids,
            num_beams=beams,
            sampling=SamplingParams(**sampling) if self.do_sample else None,
            seed=secrets.randbelow(2**31) if self.seed is None else self.seed,
            deadline_s=deadline_s if self.deadline_s is None else self.deadline_s,
            stopping_criterion=stopping_criterion,
            **self.model_dump(include={*_HANDED_ON}, exclude_none=True),
            **options,
        )


class StreamOptions(Asked):
    """Options of a completion that streams."""

    neutral = {"include_obfuscation": False}

    include_usage: bool = False
    include_obfuscation: bool | None = Field(None, description="Only false.")


class Completion(_Common):
    """Complete one or several prompts, for OpenAI's clients. The prompt is the encoder's source, and never echoed."""

    neutral = dict(frequency_penalty=0, presence_penalty=0, echo=False, logprobs=None, logit_bias={}, suffix="")

    model: str
    prompt: str | list[str] = Field(description="One source with its prefix, or a list of them.")
    max_tokens: int | None = Field(None, description="Default: 16, or what server and model allow.")
    temperature: float | None = Field(None, description="Left out (unlike OpenAI's) or 0: the likeliest tokens.")
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
        """The same request with our names."""
        if self.stream_options is not None and not self.stream:
            raise InputError("stream_options given without stream.")
        if self.best_of not in (None, self.n):
            raise unsupported("best_of", f"best_of must be n, {self.n}, or null, got {self.best_of}. Leave it out.")
        drawn = bool(self.temperature)
        if not drawn and (self.top_p not in (None, 1) or self.n != 1):
            raise InputError("top_p and n need a temperature above 0: without one the likeliest tokens are taken.")
        useless = set() if drawn else {"temperature", "top_p", "seed"}
        common = self.model_dump(include=_Common.model_fields.keys() - useless)
        return Generate(
            text=self.prompt, max_new_tokens=self.max_tokens, do_sample=drawn, num_return_sequences=self.n, **common
        )


class Timings(BaseModel):
    """Seconds since the request arrived; null for moments that never came."""

    queue_s: float | None = Field(description="Until it joined the running batch.")
    first_token_s: float | None
    total_s: float | None


class TextAnswers(BaseModel):
    """The answers to one text; each list has num_return_sequences items, best first."""

    texts: list[str]
    scores: list[float | None] = Field(
        description="Log-probability with the length penalty; null without beams, or where they found no answer."
    )
    tokens: list[int] = Field(description="Generated tokens.")
    ended: list[bool] = Field(description="True: by the end token or a stop text. False: cut at max_new_tokens.")
    source_tokens: int
    encoder_reused: bool = Field(description="The encoder output came from the cache.")
    timings: Timings


class GenerateResponse(BaseModel):
    """The response of /generate; with stream server-sent events, each a `GenerateEvent`."""

    model: str
    seed: int | None = Field(description="With do_sample: the seed to repeat the same answers.")
    answers: list[TextAnswers] = Field(description="One for each text, in order.")


class GenerateEvent(BaseModel):
    """One event of a stream: new text. The last event of each text has the other fields, too."""

    index: int = Field(description="Which text.")
    text: str
    tokens: int | None = None
    ended: bool | None = None
    timings: Timings | None = None


class Choice(BaseModel):
    """One answer to one prompt."""

    index: int = Field(description="Prompt by prompt, with n answers each.")
    text: str
    logprobs: None = None
    finish_reason: Literal["stop", "length"] | None = Field(description="null while a stream goes on.")


class Usage(BaseModel):
    """Tokens of all prompts and answers."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionResponse(BaseModel):
    """The response of /v1/completions; with stream each server-sent event is one, and the last is [DONE]."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | None = None


class ModelCard(BaseModel):
    """The model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(BaseModel):
    """All models: one."""

    object: Literal["list"]
    data: list[ModelCard]


class Alive(BaseModel):
    """Whether the engine works."""

    alive: bool


class Ready(BaseModel):
    """Whether to send requests here, and the load."""

    ready: bool
    waiting: int = Field(description="Requests in the queue.")
    running: int = Field(description="Requests in the batch.")
    rows: int = Field(description="Rows of the batch.")
    continuous: bool = Field(description="False: requests wait until the running batch has ended.")


class About(BaseModel):
    """What this server is, and its routes."""

    name: str
    version: str
    model: str
    routes: list[str]


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: Literal["invalid_request_error", "authentication_error", "rate_limit_error", "server_error"]
    param: str | None = Field(description="The field to blame.")
    code: str | None


class ErrorResponse(BaseModel):
    """Every error has this shape, which OpenAI's clients read."""

    error: ErrorDetail


EVERYWHERE = (401, 421)


def openapi_responses(
    model: type[BaseModel] | None, *errors: int, event: type[BaseModel] | None = None, is_open: bool = False
) -> dict[int | str, Any]:
    """FastAPI's ``responses`` of a route.

    ``model`` is the body of status 200 (``None``: plain text), ``errors`` are statuses beside those of every route, and
    ``event`` is the data of a server-sent event. An open route needs no key, and also answers 503 with ``model``.
    """
    plain = {"content": {"text/plain": {"schema": {"type": "string"}}}}
    found: dict[int | str, Any] = {200: {"model": model} if model else plain}
    if event:
        found[200]["content"] = {"text/event-stream": {"schema": inlined(event.model_json_schema())}}
    if is_open:
        return {**found, 503: {"model": model, "description": "No."}}
    for status in (*EVERYWHERE, *errors):
        found[status] = {"model": ErrorResponse}
    return found


def inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """A JSON schema without ``$defs``, which OpenAPI would not resolve."""
    definitions = schema.get("$defs", {})

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(item) for item in value]
        if not isinstance(value, dict):
            return value
        if "$ref" in value:
            return plain(definitions[value["$ref"].rpartition("/")[2]])
        return {name: plain(item) for name, item in value.items() if name != "$defs"}

    return plain(schema)


def page(interface: dict[str, Any]) -> str:
    """An OpenAPI description as HTML without scripts and foreign hosts."""
    title, about = escape(interface["info"]["title"]), escape(interface["info"]["description"])
    parts = [f"<h1>{title}</h1><p>{about}</p>"]
    operations = [(path, *one) for path, methods in interface["paths"].items() for one in methods.items()]
    for path, method, operation in operations:
        parts.append(f"<h2>{method.upper()} {escape(path)}</h2><p>{escape(operation.get('description', ''))}</p>")
        for what, holder in (("", operation.get("requestBody", {})), ("The response:", operation["responses"]["200"])):
            schema = holder.get("content", {}).get("application/json", {}).get("schema", {})
            schema = interface["components"]["schemas"].get(schema.get("$ref", "").rpartition("/")[2], schema)
            needed, fields = schema.get("required", []), schema.get("properties", {})
            if fields:
                parts.append(f"<p>{what}</p><table><tr><th>field</th><th>type</th><th>default</th><th></th></tr>")
                for name in sorted(fields, key=lambda one, needed=needed: one not in needed):
                    parts.append(_table_row(name, fields[name], is_required=not what and name in needed))
                parts.append("</table>")
    style = "body{font:16px sans-serif;max-width:60em;margin:2em auto}td,th{text-align:left;padding:.2em 1em .2em 0}"
    head = f"<meta charset=utf-8><title>{title}</title><style>{style}</style>"
    return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(parts)}</body></html>"


def _table_row(name: str, field: dict[str, Any], *, is_required: bool) -> str:
    kinds = [kind for one in field.get("anyOf", [field]) if (kind := _kind(one)) != "null"]
    default = "required" if is_required else "" if field.get("default") is None else str(field["default"])
    cells = (name, " or ".join(kinds), default, field.get("description", ""))
    return "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"


def _kind(one: dict[str, Any]) -> str:
    if "$ref" in one:
        return one["$ref"].rpartition("/")[2]
    return repr(one["const"]) if "const" in one else one.get("type", "object")
