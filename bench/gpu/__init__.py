"""The suite for GPUs."""
