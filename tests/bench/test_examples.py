"""The examples of `bench` and `training`."""

from pathlib import Path

from test_copying import COPIED, OF_THE_PACKAGE, require_that_examples_run


def test_examples_run_where_the_module_was_copied_to(tmp_path: Path) -> None:
    require_that_examples_run([name for name in COPIED if name not in OF_THE_PACKAGE], tmp_path)
