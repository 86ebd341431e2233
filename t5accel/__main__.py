"""`python -m t5accel …` is the same as `t5accel …`."""

from t5accel.cli import app

app()
