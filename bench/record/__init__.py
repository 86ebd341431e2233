"""One program per file of data/results/.

``fused-step.json`` and ``step-parts.json`` are closed studies: their programs, ``bench/record/fused_step.py`` and
``step_parts.py``, are in the history at commit 68ac1ea.
"""
