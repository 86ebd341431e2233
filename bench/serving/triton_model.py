"""Triton's Python backend; `python -m bench triton` copies this file as ``model.py``.

With dynamic batching a batch is answered as a whole. Of iterative sequences Triton hands over all that run, once per
step: new ones join our scheduler, one round is made, and unfinished ones come again.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from t5accel.backends.ort_session import SessionSettings
from t5accel.backends.ort_static import OrtStatic
from t5accel.errors import T5AccelError
from t5accel.serve.limits import SchedulerLimits
from t5accel.serve.request import GenerationRequest, GenerationResult, RequestHandle
from t5accel.serve.scheduler import Scheduler
from t5accel.tokenization import tokenizer_of


class TritonPythonModel:
    """One instance of the model, in a separate process."""

    def initialize(self, args: dict[str, str]) -> None:
        """Open the export that lies beside this file, or beside that of the model that ``export_of`` names."""
        self.triton = import_module("triton_python_backend_utils")  # only there where Triton runs this
        config = json.loads(args["model_config"])
        values = {name: value["string_value"] for name, value in config["parameters"].items()}
        folder = Path(args["model_repository"])
        if "export_of" in values:
            folder = folder.parent / values["export_of"]
        folder = folder / args["model_version"] / "export"
        backend = OrtStatic(folder, settings=SessionSettings(threads=int(values["threads"])))
        self.tokenizer = tokenizer_of(folder)
        limits = SchedulerLimits(rows=config["max_batch_size"], encoder_cache_bytes=0)
        self.scheduler = Scheduler(backend, limits, thread=False)
        self.in_flight = config.get("model_transaction_policy", {}).get("decoupled", False)
        self.tickets: dict[int, RequestHandle] = {}

    def execute(self, requests: list[Any]) -> list[Any] | None:
        """A batch, or one step of all that are under way."""
        return self._step(requests) if self.in_flight else self._batch(requests)

    def _batch(self, requests: list[Any]) -> list[Any]:
        found: list[list[RequestHandle] | str] = []
        for request in requests:
            try:
                found.append(self.scheduler.submit_all(self._jobs(request)))
            except T5AccelError as error:
                found.append(str(error))
        while self.scheduler.step():
            pass
        return [self._failure(one) if isinstance(one, str) else self._response(one) for one in found]

    def _step(self, requests: list[Any]) -> None:
        refused = {}
        for request in requests:
            number = request.correlation_id()
            if request.is_cancelled() and number in self.tickets:
                self.tickets[number].cancel()
            elif number not in self.tickets:
                try:
                    (self.tickets[number],) = self.scheduler.submit_all(self._jobs(request))
                except (T5AccelError, ValueError) as error:
                    refused[number] = str(error)
        self.scheduler.step()
        for request in requests:
            number = request.correlation_id()
            if number in refused:
                self._send(request, self._failure(refused[number]), last=True)
            elif self.tickets[number].is_done:
                self._send(request, self._response([self.tickets.pop(number)]), last=True)
            else:
                if self._value(request, "stream", False):
                    self._send(request, self._response([], tokens=len(self.tickets[number].tokens)), last=False)
                request.set_release_flags(self.triton.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)

    def _send(self, request: Any, response: Any, *, last: bool) -> None:
        flags = self.triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL if last else 0
        request.get_response_sender().send(response, flags=flags)

    def _value(self, request: Any, name: str, default: Any) -> Any:
        tensor = self.triton.get_input_tensor_by_name(request, name)
        return default if tensor is None else tensor.as_numpy().ravel()[0].item()

    def _jobs(self, request: Any) -> list[GenerationRequest]:
        """One for each text, of which a request has several if its client sends a batch."""
        texts = self.triton.get_input_tensor_by_name(request, "text").as_numpy().ravel()
        batch = self.tokenizer([text.decode() for text in texts])
        return [
            GenerationRequest(
                ids[mask == 1], max_new_tokens=self._value(request, "max_new_tokens", 64),
                min_new_tokens=self._value(request, "min_new_tokens", None),
                num_beams=self.scheduler.backend.rules.num_beams,
                stream=self._value(request, "stream", False),
            )
            for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
        ]  # fmt: skip

    def _response(self, tickets: list[RequestHandle], tokens: int = 0) -> Any:
        """Texts and numbers of tokens; of a stream that goes on, the number so far."""
        try:
            answers: list[GenerationResult] = [ticket.result(0)[0] for ticket in tickets]
        except T5AccelError as error:
            return self._failure(str(error))
        rows = [answer.tokens for answer in answers]
        texts = self.tokenizer.batch_decode(rows, skip_special_tokens=True) if rows else [""]
        counts = [len(row) for row in rows] or [tokens]
        tensor = self.triton.Tensor
        return self.triton.InferenceResponse([
            tensor("text", np.array([[text.encode()] for text in texts], dtype=object)),
            tensor("tokens", np.array([[count] for count in counts], dtype=np.int32)),
        ])  # fmt: skip

    def _failure(self, said: str) -> Any:
        return self.triton.InferenceResponse([], error=self.triton.TritonError(said))

    def finalize(self) -> None:
        """Nothing runs any more."""
        self.scheduler.close()
