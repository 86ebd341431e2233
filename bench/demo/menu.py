"""What the demo and the web page offer: tasks, the fields of each, and examples that their models answer rightly."""

from __future__ import annotations

from dataclasses import dataclass, field

from bench.tasks import CONTEXT, NAMES, QUESTION, SUMMARIZE, TRANSLATE, rows

# Rows of the evaluation sets, each task's first one prefilled. The bundled models, and the readers, answer them as a
# reference does in every precision that is offered; in `WRONG` none does. A test holds both.
EXAMPLES = (
    "translation-162", "translation-118", "translation-196", "translation-167", "translation-001",
    "summaries-seen-043", "summaries-seen-005",
    "questions-seen-083", "questions-seen-048", "questions-seen-018", "questions-seen-081", "questions-seen-063",
    "questions-unseen-091",
)  # fmt: skip
WRONG = ("translation-001",)


@dataclass(frozen=True)
class Task:
    """One thing that can be asked.

    Attributes:
        id, label: for programs and for people.
        language: of the answer.
        template: the source, with the names of the fields in braces.
        fields: what a person writes, by name its label.
        examples: texts for these fields.
        titles: what a list calls the examples.
    """

    id: str
    label: str
    language: str
    template: str
    fields: dict[str, str]
    examples: list[dict[str, str]] = field(repr=False)
    titles: list[str] = field(repr=False)

    def source(self, texts: dict[str, str]) -> str:
        """What the model reads.

        >>> menu()[2].source({"question": "Who slept?", "context": "The cat slept."})
        'question: Who slept? context: The cat slept.'
        """
        return self.template.format(**texts)


def menu() -> list[Task]:
    """All tasks, with their examples.

    >>> [(task.id, len(task.examples)) for task in menu()]
    [('translate', 5), ('summarise', 2), ('ask', 6)]
    >>> menu()[0].titles[-1]
    'The kitchen sink is leaking. (known failure: answered wrongly)'
    """
    by_id = {name: {row["id"]: row for row in rows(name)} for name in NAMES}

    def task(id_: str, label: str, language: str, template: str, name: str, **fields: str) -> Task:
        ids = [one for one in EXAMPLES if one in by_id[name]]
        examples = [{key: by_id[name][one]["source" if key == "text" else key] for key in fields} for one in ids]
        failure = " (known failure: answered wrongly)"
        firsts = [next(iter(texts.values())) for texts in examples]
        titles = [text + failure * (one in WRONG) for one, text in zip(ids, firsts, strict=True)]
        return Task(id_, label, language, template, fields, examples, titles)

    asking = QUESTION + "{question}" + CONTEXT + "{context}"
    return [
        task("translate", "Translate into French", "fr", TRANSLATE + "{text}", "translation", text="English sentence"),
        task("summarise", "Summarise", "en", SUMMARIZE + "{text}", "summaries", text="Your text"),
        task("ask", "Ask about a text", "en", asking, "questions", question="Question", context="Text"),
    ]
