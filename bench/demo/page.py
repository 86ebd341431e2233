"""A page on which several ways answer one text at once, with time, size, and whether their answers are the same.

It is Gradio's, without what Gradio fetches from elsewhere: fonts, a script, and a report of its use.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from statistics import median
from tempfile import TemporaryDirectory
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from bench.demo.at_home import BlockExternalResources
from bench.demo.race import LoadedSystem, Progress, Task, difference, example_tasks, interleave, load_system, ways_of
from t5accel.errors import InputError, MissingPackageError, T5AccelError

if TYPE_CHECKING:
    from gradio import Blocks

FEWEST, MOST = 2, 4  # ways at a time
MAX_SOURCE_TOKENS, MAX_NEW_TOKENS = 512, 128
MAX_WAITING = 64  # later visitors get an error
SHOWN_EVERY_S = 0.05
RUNS, LONG_S = 3, 10.0  # figures are medians of so many runs, unless the first one takes so long
ADDRESS, PORT = "127.0.0.1", 7860


def answers(
    model: str, chosen: Sequence[str], source: str, *, load: Callable[[str, str], LoadedSystem] = load_system
) -> Iterator[tuple[str, dict[str, tuple[str, str]]]]:
    """Answer a source in several ways, and say again and again how far they are.

    Args:
        chosen: labels of `race.ways_of`; the first one is what the others are compared with.

    Returns:
        What happens, in a sentence; and by label what has been written and in which time.
    """
    known = ways_of(model)
    if missing := [label for label in chosen if label not in known]:
        raise InputError(f"{model} has no way “{missing[0]}”: choose among the others.")
    chosen = [label for label in known if label in chosen]
    if not FEWEST <= len(chosen) <= MOST:
        raise InputError(f"Choose {FEWEST} to {MOST} ways to compare.")
    ways: dict[str, LoadedSystem] = {}
    for label in chosen:
        yield f"Loading {label}.", {}
        ways[label] = load(*known[label])
    inputs = {}
    for label, loaded in ways.items():
        batch = loaded.tokenizer([source], return_tensors="np", padding=True)
        inputs[label] = batch["input_ids"], batch["attention_mask"]
        if (tokens := inputs[label][0].shape[1]) > MAX_SOURCE_TOKENS:
            raise InputError(f"This text has {tokens} tokens, and the page takes {MAX_SOURCE_TOKENS}: shorten it.")

    def shown(lanes: dict[str, Progress], runs: int = 0) -> dict[str, tuple[str, str]]:
        first = lanes[chosen[0]]
        return {
            label: (_text(ways[label], lane), _figures(ways[label], lane, first, runs)) for label, lane in lanes.items()
        }

    runs: list[dict[str, Progress]] = []
    shown_at = 0.0
    while len(runs) < RUNS and (not runs or sum(lane.seconds for lane in runs[0].values()) < LONG_S):
        streams = {label: ways[label].stream(*inputs[label], MAX_NEW_TOKENS) for label in chosen}
        with closing(interleave(streams)) as progress:
            for lanes in progress:
                if time.monotonic() - shown_at > SHOWN_EVERY_S:
                    yield "Timing again." if runs else "Writing.", shown(runs[0] if runs else lanes)
                    shown_at = time.monotonic()
        runs.append(lanes)
    yield "Done.", shown({label: _median([lanes[label] for lanes in runs]) for label in chosen}, len(runs))


def _median(lanes: Sequence[Progress]) -> Progress:
    """One lane with the median times of several runs of it."""
    first_s = median(lane.first_s or 0.0 for lane in lanes)
    return Progress(lanes[0].tokens, first_s or None, median(lane.seconds for lane in lanes), has_ended=True)


def _text(loaded: LoadedSystem, lane: Progress) -> str:
    (text,) = loaded.tokenizer.batch_decode([lane.tokens], skip_special_tokens=True)
    return text


def _figures(loaded: LoadedSystem, lane: Progress, first: Progress, runs: int) -> str:
    """Beside an answer, in Markdown; ``runs`` is 0 as long as it is being written."""
    found = [f"**{lane.tokens_per_s:.0f} tokens/s**", f"{len(lane.tokens)} tokens in {lane.seconds:.2f} s"]
    found += [f"first after {lane.first_s:.2f} s"] if lane.first_s else []
    found += [f"{loaded.size_bytes / 1e6:.0f} MB"]
    found += [f"median of {runs} runs" if runs > 1 else "one run"] if runs else []
    if lane is not first and lane.has_ended and first.has_ended:
        found.append(difference(first.tokens, lane.tokens))
    return " · ".join(found)


def make_demo(model: str = "mini", *, own_model: bool = True) -> Blocks:
    """The page, for a Gradio app of your own or for `launch`.

    Args:
        own_model: let visitors name another model, which is then loaded from this machine's disk or from the hub.
    """
    gradio = _gradio()
    with gradio.Blocks(title="t5accel: side by side", analytics_enabled=False) as page:
        gradio.Markdown("# One text, several ways")
        _writers(gradio, model, own_model)
    return page.queue(max_size=MAX_WAITING)


# One run at a time, or the ways of two visitors would slow each other down.
_ALONE: dict[str, Any] = dict(show_progress="hidden", concurrency_limit=1, concurrency_id="machine")


def _writers(gradio: Any, model: str, own_model: bool) -> None:
    """Fields, buttons and lanes."""
    tasks = {task.label: task for task in example_tasks()}
    first = next(iter(tasks.values()))
    known = list(ways_of(model))
    # A menu that changes while somebody clicks turns the click into an error: so all labels are always there.
    labels = list(ways_of("mini")) if own_model else known

    gradio.Markdown(
        "A T5 writes an answer. The ways take turns, and who has computed least goes next: each has the machine to "
        f"itself, and its time is the one that it takes alone, the median of {RUNS} runs. Tokens are compared with "
        "those of the first way."
    )
    with gradio.Row():
        task = gradio.Radio(list(tasks), value=first.label, label="Task")
        given = gradio.Textbox(
            model, label="Model", info="mini, a folder, or a hub id", interactive=own_model, visible=own_model
        )
    example = gradio.Dropdown(_labels(first), value=0, label="Examples", interactive=True)
    boxes = [gradio.Textbox(**_box(first, place), lines=2, interactive=True) for place in range(2)]
    chosen = gradio.CheckboxGroup(labels, value=known[:MOST], label="Ways")
    with gradio.Row():
        run = gradio.Button("Run", variant="primary")
        stop = gradio.Button("Stop")
    status = gradio.Markdown("", elem_id="status")
    lanes = []
    with gradio.Row():
        for place in range(MOST):
            with gradio.Column(min_width=200, elem_classes="lane"):
                lanes.append(gradio.Textbox("", label=known[place], lines=4, interactive=False))
                lanes.append(gradio.Markdown("", elem_classes="figures"))

    def choose_task(label: str) -> list[Any]:
        now = tasks[label]
        return [gradio.update(choices=_labels(now), value=0),
                *(gradio.update(**_box(now, place)) for place in range(2))]  # fmt: skip

    def choose_example(label: str, number: int | None) -> list[Any]:
        return _example(gradio, tasks[label], number)

    def choose_model(name: str) -> list[str]:
        return list(ways_of(name.strip()))[:MOST]

    def answer_all(label: str, name: str, ways: list[str], *texts: str) -> Iterator[list[Any]]:
        try:
            source = tasks[label].source(_named(tasks[label], texts))
            for sentence, found in answers(name.strip() if own_model else model, ways, source):
                yield [sentence, *_lanes(gradio, ways_of(name.strip()), ways, found)]
        except T5AccelError as error:
            yield [str(error), *[gradio.skip()] * len(lanes)]

    task.change(choose_task, task, [example, *boxes], show_progress="hidden")
    example.input(choose_example, [task, example], boxes, show_progress="hidden")
    given.submit(choose_model, given, chosen)
    given.blur(choose_model, given, chosen)
    asked = [task, given, chosen, *boxes]
    triggers = [run.click, *(box.submit for box in boxes)]
    running = gradio.on(triggers, answer_all, asked, [status, *lanes], **_ALONE)
    stop.click(None, cancels=[running])
    # Until it has ended, further clicks on Run are ignored: this says from when on they are not.
    running.failure(lambda: "Stopped.", None, status, show_progress="hidden")


def _example(gradio: Any, task: Task, number: int | None) -> list[Any]:
    """An example's texts, for both fields."""
    texts = [] if number is None else list(task.examples[number].values())
    return [gradio.skip() if place >= len(texts) else texts[place] for place in range(2)]


def _named(task: Task, texts: Sequence[str]) -> dict[str, str]:
    """The texts by the names of their fields; raises ``InputError`` if one is empty."""
    named = {name: text.strip() for name, text in zip(task.fields, texts, strict=False)}
    for name, text in named.items():
        if not text:
            raise InputError(f"Nothing is written under “{task.fields[name]}”.")
    return named


def _labels(task: Task) -> list[tuple[str, int]]:
    return [(shorten(title, 90, placeholder=" …"), at) for at, title in enumerate(task.titles)]


def _box(task: Task, place: int) -> dict[str, Any]:
    """A field with the first example's text in it."""
    labels, texts = list(task.fields.values()), list(task.examples[0].values())
    if place >= len(labels):
        return {"label": "", "value": "", "visible": False}
    return {"label": labels[place], "value": texts[place], "visible": True}


def _lanes(gradio: Any, known: Sequence[str], ways: Sequence[str], found: dict[str, tuple[str, str]]) -> list[Any]:
    """Contents of the answer boxes, in the order of the systems."""
    shown = [label for label in known if label in ways]
    updates = []
    for place in range(MOST):
        label = shown[place] if place < len(shown) else ""
        text, figures = found.get(label, ("", ""))
        updates += [gradio.update(value=text, label=label, visible=bool(label)), figures]
    return updates


def launch(model: str = "mini", *, port: int | None = None, share: bool = False, block: bool = True) -> str:
    """Serve the page on this machine, in a notebook below the cell, too; returns its address.

    Args:
        port: by default 7860, or the next one that is free.
        share: let Gradio, the company, make a public address; visitors then cannot name another model.
    """
    with TemporaryDirectory(prefix="t5accel-demo-") as folder:
        if block:  # in a separate process: what Gradio lays out for files, which nobody sends, goes before it is used
            os.environ.setdefault("GRADIO_TEMP_DIR", folder)
        gradio = _gradio()
        from starlette.middleware import Middleware  # Gradio's

        if port is not None:
            _require_free(port)
        load_system(*list(ways_of(model).values())[1])
        page = make_demo(model, own_model=not share)
        fonts = ["system-ui", "sans-serif"], ["ui-monospace", "monospace"]
        theme = gradio.themes.Base(font=fonts[0], font_mono=fonts[1])
        theme.set(block_info_text_color="*neutral_500", block_info_text_color_dark="*neutral_400")  # or hardly seen
        _, url, public = page.launch(
            server_name=ADDRESS, server_port=port, share=share, prevent_thread_lock=True, ssr_mode=False,
            run_history=False, enable_monitoring=False, footer_links=[], theme=theme,
            max_file_size=1,  # `BlockExternalResources` refuses files; by a new way they would be empty
            app_kwargs={"middleware": [Middleware(BlockExternalResources)]},
        )  # fmt: skip
    if block:
        page.block_thread()
    return public or url


def _require_free(port: int) -> None:
    """Raise ``InputError`` if another program listens there, before a model is loaded."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was just left is free
        try:
            taken.bind((ADDRESS, port))
        except OSError as error:
            raise InputError(
                f"port must be free, got {port}, which cannot be used ({error.strerror}). Give another one."
            ) from error


def _gradio() -> Any:
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # read when it is imported
    try:
        import gradio
    except ImportError as error:
        raise MissingPackageError(
            f"{error.name} is missing. Gradio needs transformers 5: run `make demo` in a checkout, which installs both "
            "into a separate environment, or install the packages of requirements/demo.txt into one."
        ) from error
    return gradio
