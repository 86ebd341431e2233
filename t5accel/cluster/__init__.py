"""Batch jobs and servers on several cores or machines, by Ray."""
