"""What the demo and the web page offer: tasks, the fields of each, and examples from the evaluation sets."""

from __future__ import annotations

from dataclasses import dataclass, field

from t5accel.tasks import CONTEXT, NAMES, QUESTION, SUMMARIZE, TRANSLATE, rows


@dataclass(frozen=True)
class Task:
    """One thing that can be asked.

    Attributes:
        id, label: for programs and for people.
        language: of the answer.
        template: the source, with the names of the fields in braces.
        fields: what a person writes, by name its label.
        examples: texts for these fields.
    """

    id: str
    label: str
    language: str
    template: str
    fields: dict[str, str]
    examples: list[dict[str, str]] = field(repr=False)

    def source(self, texts: dict[str, str]) -> str:
        """What the model reads.

        >>> menu()[2].source({"question": "Who slept?", "context": "The cat slept."})
        'question: Who slept? context: The cat slept.'
        """
        return self.template.format(**texts)


def menu(examples: int = 2) -> list[Task]:
    """All tasks, with so many examples of each part of their evaluation sets.

    >>> [(task.id, len(task.examples)) for task in menu(1)]
    [('translate', 3), ('summarise', 2), ('ask', 2)]
    """
    translations, summaries, questions = (rows(name, limit=examples) for name in NAMES)
    return [
        Task("translate", "Translate into French", "fr", TRANSLATE + "{text}", {"text": "English sentence"},
             [{"text": row["source"]} for row in translations]),
        Task("summarise", "Summarise", "en", SUMMARIZE + "{text}", {"text": "Your text"},
             [{"text": row["source"]} for row in summaries]),
        Task("ask", "Ask about a text", "en", QUESTION + "{question}" + CONTEXT + "{context}",
             {"question": "Question", "context": "Text"},
             [{name: row[name] for name in ("question", "context")} for row in questions]),
    ]  # fmt: skip
