"""Corpus chrF, 0 to 100, as a local ``evaluate`` module: ``evaluate.load("data/metrics/chrf")``, no network needed.

A thin shell: the one implementation is ``t5accel.metrics.chrf`` (sacrebleu).
"""

# one import per line: evaluate reads them as text
import datasets
import evaluate

from t5accel import metrics


class Chrf(evaluate.Metric):
    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=__doc__,
            citation="Popović 2015, chrF: character n-gram F-score for automatic MT evaluation",
            inputs_description="predictions: N texts; references: N lists of accepted texts, one or more each.",
            features=datasets.Features(
                {"predictions": datasets.Value("string"), "references": datasets.Sequence(datasets.Value("string"))}
            ),
        )

    def _compute(self, predictions: list[str], references: list[list[str]]) -> dict[str, float]:
        return {"chrf": metrics.chrf(predictions, references)}
