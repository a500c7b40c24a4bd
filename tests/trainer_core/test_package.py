import subprocess
import sys

import trainer_core


def test_without_torch_the_import_ends_in_one_line_that_names_the_extra() -> None:
    program = "import sys; sys.modules['torch'] = None; import trainer_core"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert "During handling" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: ")
    assert "pip install 'ckpttool[train]'" in last


def test_every_public_name_is_there() -> None:
    for name in trainer_core.__all__:
        assert getattr(trainer_core, name) is not None
