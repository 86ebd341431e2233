"""Mean ROUGE-1, ROUGE-2 and ROUGE-L, 0 to 100, as a local ``evaluate`` module, no network needed.

``evaluate.load("data/metrics/rouge")``. A thin shell: the implementation is ``t5accel.metrics.rouge`` (rouge-score).
The hub's ``rouge`` runs from 0 to 1.
"""

# one import per line: evaluate reads them as text
import datasets
import evaluate

from t5accel import metrics


class Rouge(evaluate.Metric):
    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=__doc__,
            citation="Lin 2004, ROUGE: A Package for Automatic Evaluation of Summaries",
            inputs_description="predictions: N texts; references: N lists of accepted texts, one or more each.",
            features=datasets.Features(
                {"predictions": datasets.Value("string"), "references": datasets.Sequence(datasets.Value("string"))}
            ),
        )

    def _compute(self, predictions: list[str], references: list[list[str]]) -> dict[str, float]:
        return metrics.rouge(predictions, references)
