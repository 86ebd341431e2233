"""Response schemas of the OpenAPI description, and its page. Responses themselves are not validated."""

from __future__ import annotations

from html import escape
from typing import Any, Literal

from pydantic import BaseModel, Field


class Timings(BaseModel):
    """Seconds since the request arrived; null for moments that never came."""

    queue_s: float | None = Field(description="Until it joined the running batch.")
    first_token_s: float | None
    total_s: float | None


class TextAnswers(BaseModel):
    """The answers to one text; each list has num_return_sequences items, best first."""

    texts: list[str]
    scores: list[float | None] = Field(description="Log-probability with the length penalty, for beams; else null.")
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


class Version(BaseModel):
    """The version of t5accel."""

    version: str


class About(Version):
    """What this server is, and its routes."""

    name: str
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


ERRORS = {
    400: "The request is not valid.",
    401: "The API key is missing or wrong.",
    404: "There is no such model.",
    408: "The request arrived too slowly.",
    413: "The text or the body is too long.",
    415: "The body is not sent as application/json.",
    421: "The Host header is not allowed.",
    422: "A value is not valid.",
    429: "The queue is full; see Retry-After.",
    500: "The engine failed.",
    503: "The server is shutting down or full.",
    504: "The deadline has passed.",
}
EVERYWHERE = (401, 421)


def openapi_responses(
    model: type[BaseModel] | None, *errors: int, event: type[BaseModel] | None = None, unavailable: bool = False
) -> dict[int | str, Any]:
    """FastAPI's ``responses`` of a route.

    Args:
        model: the body of status 200; None: plain text.
        errors: statuses with an `ErrorResponse`, beside those of every route.
        event: the data of a server-sent event.
        unavailable: whether the route needs no key, and answers status 503 with ``model``, too.

    >>> sorted(openapi_responses(Version, 404))
    [200, 401, 404, 421]
    """
    plain = {"content": {"text/plain": {"schema": {"type": "string"}}}}
    found: dict[int | str, Any] = {200: {"model": model} if model else plain}
    if event:
        found[200]["content"] = {"text/event-stream": {"schema": inlined(event.model_json_schema())}}
    if unavailable:
        return {**found, 503: {"model": model, "description": "No."}}
    for status in (*EVERYWHERE, *errors):
        found[status] = {"model": ErrorResponse, "description": ERRORS[status]}
    return found


def inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """A JSON schema without ``$defs``, whose references would point nowhere inside an OpenAPI description.

    >>> inlined({"a": {"$ref": "#/$defs/B"}, "$defs": {"B": {"type": "string"}}})
    {'a': {'type': 'string'}}
    """
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
    """An OpenAPI description as HTML that needs no script and nothing from another host.

    >>> page({"info": {"title": "T5 & co"}, "paths": {"/a": {"get": {"description": "Says a."}}}})[-70:]
    '<h1>T5 &amp; co</h1><p></p><h2>GET /a</h2><p>Says a.</p></body></html>'
    """
    title, about = escape(interface["info"]["title"]), escape(interface["info"].get("description", ""))
    parts = [f"<h1>{title}</h1><p>{about}</p>"]
    schemas = interface.get("components", {}).get("schemas", {})
    for path, operations in interface["paths"].items():
        for method, operation in operations.items():
            parts.append(f"<h2>{method.upper()} {escape(path)}</h2><p>{escape(operation.get('description', ''))}</p>")
            answer = operation.get("responses", {}).get("200", {}).get("content", {}).get("application/json")
            for what, content in (
                ("", operation.get("requestBody", {}).get("content", {}).get("application/json")),
                ("The response:", answer),
            ):
                if content is None:
                    continue
                name = content["schema"].get("$ref", "").rpartition("/")[2]
                schema = schemas.get(name, content["schema"])
                needed, fields = schema.get("required", []), schema.get("properties", {})
                parts.append(f"<p>{what}</p><table><tr><th>field</th><th>type</th><th>default</th><th></th></tr>")
                default = "" if what else "required"
                for name in sorted(fields, key=lambda one, needed=needed: one not in needed):
                    parts.append(_line(name, fields[name], default if name in needed else ""))
                parts.append("</table>")
    style = "body{font:16px sans-serif;max-width:60em;margin:2em auto}td,th{text-align:left;padding:.2em 1em .2em 0}"
    head = f"<meta charset=utf-8><title>{title}</title><style>{style}</style>"
    return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(parts)}</body></html>"


def _line(name: str, field: dict[str, Any], default: str) -> str:
    """A row of the table; of a field with a default that one in place of ``default``."""
    kinds = [_kind(one) for one in field.get("anyOf", [field])]
    default = str(field["default"]) if field.get("default") is not None else default
    cells = (name, " or ".join(kind for kind in kinds if kind != "null"), default, field.get("description", ""))
    return "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"


def _kind(one: dict[str, Any]) -> str:
    if "$ref" in one:
        return one["$ref"].rpartition("/")[2]
    return repr(one["const"]) if "const" in one else one.get("type", "object")
