"""Triton's interpreter for this whole process: the variable must be set before Triton is first imported."""

import os

os.environ["TRITON_INTERPRET"] = "1"
