"""Corpus BLEU, 0 to 100, as a local ``evaluate`` module: ``evaluate.load("data/metrics/bleu")``, no network needed.

A thin shell: the one implementation is ``t5accel.metrics.bleu`` (sacrebleu). The hub's ``bleu`` runs from 0 to 1.
"""

# one import per line: evaluate reads them as text
import datasets
import evaluate

from t5accel import metrics


class Bleu(evaluate.Metric):
    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=__doc__,
            citation="Post 2018, A Call for Clarity in Reporting BLEU Scores",
            inputs_description="predictions: N texts; references: N lists of accepted texts, one or more each.",
            features=datasets.Features(
                {"predictions": datasets.Value("string"), "references": datasets.Sequence(datasets.Value("string"))}
            ),
        )

    def _compute(self, predictions: list[str], references: list[list[str]]) -> dict[str, float]:
        return {"bleu": metrics.bleu(predictions, references)}
