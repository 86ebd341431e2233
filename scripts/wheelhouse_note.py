"""Print what `make wheelhouse` writes to INSTALL.txt: how to install the course from a folder of wheels."""

import sys
import sysconfig

NOTE = """\
The t5accel course without a network. These wheels are for Python {version} on {platform}.

In the folder that holds this one ("wheelhouse"), best in an environment of its own (python -m venv course):

    pip install --no-index --find-links wheelhouse "t5accel[{extras}]"

Then open the notebooks:

    jupyter lab wheelhouse/notebooks
"""

print(
    NOTE.format(version=sysconfig.get_python_version(), platform=sysconfig.get_platform(), extras=sys.argv[1]), end=""
)
