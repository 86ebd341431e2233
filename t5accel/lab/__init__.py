"""Measuring: one harness, one kind of row; the boards, ladders and grids made with them, their pictures, and advice."""
