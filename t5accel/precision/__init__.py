"""Change an export's precision: fp16, int8 and int4, calibrated and gated."""
