"""Without a GPU, the portable kernels run in Triton's interpreter.

Triton decides when a kernel is defined, so the kernels are imported here, before any test can; the switch is off again
when tests run, since selection looks at it.
"""

import os
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest
import torch

from .model.toys import dyadic_checkpoint

if find_spec("triton") and not torch.cuda.is_available():
    with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}):
        import triton.experimental.gluon  # noqa: F401  (otherwise imported at the first launch, too late)

        import dsv41.backends.cuda.flashmla
        import dsv41.backends.portable.backend  # noqa: F401  (and with it every kernel)


@pytest.fixture(scope="session")
def dyadic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the toy model on which every sum in float32 is exact. Read only."""
    path = tmp_path_factory.mktemp("toy") / "dyadic"
    dyadic_checkpoint(path, torch.float32)
    return path
