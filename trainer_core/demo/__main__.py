"""The command: `python -m trainer_core.demo DIR`."""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import signal
import sys
import warnings
import zlib
from pathlib import Path
from typing import Any

import torch

from ckpttool.exitcodes import ExitCode
from ckpttool.model.pointer import read_pointer
from trainer_core.checkpoint import CheckpointManager
from trainer_core.demo.model import CharTransformer
from trainer_core.demo.text import VOCABULARY, Crops, Text, own_text
from trainer_core.resuming.loading import load_state
from trainer_core.state import CheckpointError
from trainer_core.trainer import Trainer, TrainResult

POSITIONS = 64
BATCH = 16
SHAPE = {"width": 64, "layers": 2, "heads": 4}
PEAK_LR = 3e-3
WARM_UP_STEPS = 20

_EPILOG = """\
example: die between writing a checkpoint and moving the pointer to it, look, mend, go on

  python -m trainer_core.demo runs/demo --steps 90 --every 20 --crash-after-save 60
  ckpttool inspect runs/demo
  ckpttool fix-pointer runs/demo
  python -m trainer_core.demo runs/demo --steps 90 --every 20 --resume
"""


class Stop(Exception):  # noqa: N818 - it is how a command ends, and not always an error
    """Ends the command with one line on standard error."""

    def __init__(self, words: str, code: int) -> None:
        super().__init__(words)
        self.code = code


class DyingManager(CheckpointManager):
    """Kills its own process when the file of `last_step` is written, before the pointer moves."""

    last_step: int | None = None

    def point_to(self, step: int) -> None:
        """Moves the pointer, unless this is the moment to die."""
        if step == self.last_step:
            say(
                f"dying now (SIGKILL): {self.path_for(step).name} is written, "
                "latest.json does not name it yet"
            )
            os.kill(os.getpid(), signal.SIGKILL)
        super().point_to(step)


def main(arguments: list[str] | None = None) -> int:
    """Runs the demo; gives the exit status."""
    options = _parse(arguments)
    # So small a model gains nothing from more, and on one the result depends on no number of cores.
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            _run(options)
    except Stop as stop:
        return _fail(str(stop), stop.code)
    except CheckpointError as error:
        return _fail(str(error), ExitCode.FINDINGS)
    except OSError as error:
        return _fail(str(error), ExitCode.COULD_NOT_FINISH)
    except KeyboardInterrupt:
        return _fail("interrupted", ExitCode.INTERRUPTED)
    return ExitCode.OK


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m trainer_core.demo",
        description="Trains a small character-level transformer on this project's own text.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("directory", metavar="DIR", help="where the checkpoints go")
    add("--steps", type=_positive, default=400, help="train up to this step (400)")
    add("--every", type=_positive, default=50, help="steps between two checkpoints (50)")
    add("--keep-last", type=_positive, default=3, help="how many checkpoints stay (3)")
    add("--seed", type=_seed, default=0, help="for weights and data (0)")
    add("--device", type=_device, default="cpu", help="such as cpu or cuda (cpu)")
    add("--resume", action="store_true", help="go on from the newest valid checkpoint in DIR")
    words = "kill this process when the file of step N is written, before the pointer moves"
    add("--crash-after-save", type=_positive, metavar="N", help=words)
    options = parser.parse_args(arguments)
    crash = options.crash_after_save
    if crash is not None and (crash % options.every or crash > options.steps):
        parser.error(
            f"--crash-after-save {crash}: step {crash} is never saved; "
            f"it must be a multiple of --every {options.every}, at most --steps {options.steps}"
        )
    return options


def _positive(word: str) -> int:
    if not word.isascii() or not word.isdigit() or not 0 < len(word) <= 12 or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word!r} is not a whole number above 0")
    return int(word)


def _seed(word: str) -> int:
    if not word.isascii() or not word.isdigit() or not 0 < len(word) <= 18:
        raise argparse.ArgumentTypeError(f"{word!r} is not a whole number of at most 18 digits")
    return int(word)


def _device(word: str) -> torch.device:
    try:
        device = torch.device(word)
        torch.zeros(1, device=device).tolist()
    except Exception as error:  # torch raises all kinds here
        reason = str(error).strip().splitlines()[0]
        raise argparse.ArgumentTypeError(f"{word!r} can't be used: {reason}") from None
    return device


def _run(options: argparse.Namespace) -> None:
    manager = DyingManager(
        options.directory, every_steps=options.every, keep_last=options.keep_last
    )
    manager.last_step = options.crash_after_save
    checkpoint = _checkpoint_to_resume(manager, options.resume)
    text = own_text()
    say(f"text: {len(text.characters):,} characters of {text.files} files of this project")
    trainer = _trainer(options, text, manager)
    if checkpoint is not None:
        trainer.resume(load_state(checkpoint))
    size = sum(parameter.numel() for parameter in trainer.model.parameters())
    say(f"model: {SHAPE['layers']} layers of width {SHAPE['width']}, {size:,} parameters")
    if trainer.step >= options.steps:
        say(f"step {trainer.step} of {options.steps} is done already: nothing to do")
        return
    _check_crash(options, trainer.step)
    result = trainer.fit()
    if result.stopped_by is not None:
        words = f"{result.stopped_by}: step {result.steps} is saved, and --resume goes on from it"
        raise Stop(words, result.exit_code)
    _report(result, trainer, manager)


def _checkpoint_to_resume(manager: CheckpointManager, resume: bool) -> Path | None:
    where = manager.directory
    where.mkdir(parents=True, exist_ok=True)  # better to fail now than at the first save
    newest = manager.latest_path()
    if newest is None:
        if resume:
            say(f"{where}: there is no checkpoint to resume from, so this is a fresh start")
        return None
    if not resume:
        raise Stop(
            f"{where} holds checkpoints already: add --resume to go on from them, "
            "or choose another directory",
            ExitCode.REFUSED,
        )
    valid = manager.latest_valid_path()
    if valid is None:
        raise Stop(
            f"no checkpoint in {where} is valid: `ckpttool verify {where}` says why",
            ExitCode.FINDINGS,
        )
    pointer = read_pointer(where)
    behind = f", though latest.json names {pointer.file}" if pointer.file != valid.name else ""
    say(f"resuming from {valid}, the newest valid checkpoint{behind}")
    return valid


def _trainer(options: argparse.Namespace, text: Text, manager: CheckpointManager) -> Trainer:
    torch.manual_seed(options.seed)
    model = CharTransformer(VOCABULARY, POSITIONS, **SHAPE)
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=PEAK_LR)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARM_UP_STEPS)
    )
    return Trainer(
        model,
        optimizer,
        Crops(text.characters, batch=BATCH, positions=POSITIONS),
        device=options.device,
        config=_config(options, text),
        scheduler=scheduler,
        precision="fp32",
        checkpoint_manager=manager,
        max_steps=options.steps,
        grad_clip=1.0,
    )


def _config(options: argparse.Namespace, text: Text) -> dict[str, Any]:
    return {
        "model": {"vocabulary": VOCABULARY, "positions": POSITIONS, **SHAPE},
        "training": {"batch": BATCH, "lr": PEAK_LR, "seed": options.seed},
        "text": {"characters": len(text.characters), "crc32": _crc(text.characters)},
    }


def _check_crash(options: argparse.Namespace, step: int) -> None:
    crash = options.crash_after_save
    if crash is not None and crash <= step:
        raise Stop(f"--crash-after-save {crash}: step {step} is done already", ExitCode.USAGE)


def _report(result: TrainResult, trainer: Trainer, manager: CheckpointManager) -> None:
    losses = [record["loss"] for record in result.metrics]
    say(f"loss: {losses[0]:.3f} {curve(losses)} {losses[-1]:.3f}")
    say(
        f"done: step {result.steps}, {result.samples:,} samples and {result.tokens:,} characters "
        f"seen, {result.elapsed_s:.1f} s"
    )
    weights = zlib.crc32(b"".join(_bytes(value) for value in trainer.model.state_dict().values()))
    say(f"weights: crc32 {weights:08x}; a run that is interrupted and resumed ends with the same")
    newest = manager.latest_path()
    if newest is not None:
        say(f"newest checkpoint: {newest}")


def curve(values: list[float], width: int = 40) -> str:
    """The values as a row of bars, each the mean of a stretch; plain ASCII where need be."""
    bars = "▁▂▃▄▅▆▇█"
    try:
        bars.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        bars = "_.-=+*#@"
    count = min(width, len(values))
    edges = [len(values) * index // count for index in range(count + 1)]
    means = [sum(values[low:high]) / (high - low) for low, high in itertools.pairwise(edges)]
    low, span = min(means), (max(means) - min(means)) or 1.0
    return "".join(bars[int((mean - low) / span * (len(bars) - 1) + 0.5)] for mean in means)


def _crc(tensor: torch.Tensor) -> str:
    return f"{zlib.crc32(_bytes(tensor)):08x}"


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()


def say(line: str) -> None:
    """One line on standard output, there at once even if the next act is to die."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _fail(words: str, code: int) -> int:
    sys.stderr.write(f"demo: {words}\n")
    return code


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    sys.stderr.write(f"warning: {message}\n")


if __name__ == "__main__":
    sys.exit(main())
