"""Exact match and F1 of short answers, 0 to 100, as a local ``evaluate`` module, no network needed.

``evaluate.load("data/metrics/squad_v2")``. A thin shell: the one implementation is ``t5accel.metrics.exact_match`` and
``f1``, with SQuAD v2's normalisation. Unlike the hub's ``squad_v2`` it takes plain texts and lists of texts.
"""

# one import per line: evaluate reads them as text
import datasets
import evaluate

from t5accel import metrics


class SquadV2(evaluate.Metric):
    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=__doc__,
            citation="Rajpurkar et al. 2018, Know What You Don't Know: Unanswerable Questions for SQuAD",
            inputs_description='predictions: N answers, "unanswerable" or "" for none; references: N lists of accepted '
            'answers, an empty list or ["unanswerable"] where there is none.',
            features=datasets.Features(
                {"predictions": datasets.Value("string"), "references": datasets.Sequence(datasets.Value("string"))}
            ),
        )

    def _compute(self, predictions: list[str], references: list[list[str]]) -> dict[str, float]:
        return {
            "exact_match": metrics.exact_match(predictions, references),
            "f1": metrics.f1(predictions, references),
        }
