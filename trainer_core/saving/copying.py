"""A copy of one step, file or sharded, as safe on disk as the step itself."""

from __future__ import annotations

import os
from pathlib import Path

from ckpttool.errors import UnreadableError
from ckpttool.io.durable import copy_durably, make_directories, write_error
from ckpttool.model.names import parse_step_directory_name
from trainer_core.site import commit


def copy_step(source: Path, target: Path) -> Path:
    """Copies the step to `target`, or into it where it is a directory and no step; gives the copy.

    Raises UnreadableError and WriteError.
    """
    if target.is_dir() and parse_step_directory_name(target.name) is None:
        target = target / source.name
    make_directories(os.path.dirname(os.path.abspath(target)))
    try:
        if parse_step_directory_name(source.name) is not None:
            commit.copy(source, target)
        else:
            copy_durably(source, target, force=True)
    except UnreadableError:
        raise
    except OSError as error:
        raise write_error(target, error) from error
    return target
