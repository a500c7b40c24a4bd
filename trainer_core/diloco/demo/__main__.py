"""The command: `python -m trainer_core.diloco.demo --node-id ID --dir DIR --url URL`."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ckpttool.exitcodes import ExitCode
from trainer_core.checkpoint import CheckpointManager
from trainer_core.demo.text import VOCABULARY, Crops
from trainer_core.diloco.coordinator import DumbDiLoCoCoordinator
from trainer_core.diloco.demo.acknowledging import AcknowledgingStore
from trainer_core.diloco.demo.held_out import (
    BLOCK,
    POSITIONS,
    SHAPE,
    new_model,
    split_text,
)
from trainer_core.diloco.errors import DiLoCoError
from trainer_core.diloco.lease import LeaseError
from trainer_core.diloco.shards import seed_for, shard_for
from trainer_core.state import CheckpointError
from trainer_core.trainer import Trainer

LR = 2e-3
GRAD_CLIP = 1.0

_EPILOG = """\
example: a master and a worker over a directory, each in its own terminal; kill them, start again

  python -m trainer_core.diloco.demo --url hub --node-id m --role master --nodes m,w --dir runs/m
  python -m trainer_core.diloco.demo --url hub --node-id w --nodes m,w --dir runs/w
  python -m trainer_core.diloco status hub

The same command goes on from the newest valid checkpoint in --dir. Exit status: 0 done, 75 stopped
by a signal and saved, 1 no valid checkpoint or one of another run, 3 store or disk, 4 another
master is alive.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one node; gives the exit status."""
    options = _parser().parse_args(arguments)
    # So small a model gains nothing from more, and on one the result depends on no number of cores.
    torch.set_num_threads(1)
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s {options.node_id} %(message)s", stream=sys.stderr
    )
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            return _run(options)
    except LeaseError as error:
        return _fail(options, error, ExitCode.REFUSED)
    except (CheckpointError, ValueError) as error:
        return _fail(options, error, ExitCode.FINDINGS)
    except (DiLoCoError, OSError) as error:
        return _fail(options, error, ExitCode.COULD_NOT_FINISH)
    except KeyboardInterrupt:
        return _fail(options, "interrupted", ExitCode.INTERRUPTED)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trainer_core.diloco.demo",
        description="Trains a small character-level transformer as one node among several.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--dir", type=Path, required=True, help="where this node's checkpoints go")
    add("--node-id", required=True, help="unique among the nodes, the same after a restart")
    add("--url", help="the shared store: a directory or a URL; without it the node trains alone")
    add("--store-options", type=Path, metavar="FILE", help="JSON with options of Store.open")
    add("--role", choices=("master", "worker"), default="worker")
    add("--nodes", default="", help="every node's id, with commas: by it the text is shared out")
    add("--rounds", type=_positive, default=20, help="outer rounds to train for (20)")
    add("--inner-steps", type=_positive, default=20, help="local steps in a round (20)")
    add("--batch", type=_positive, default=16, help="samples in a step (16)")
    add("--every", type=_positive, help="steps between two checkpoints (those of a round)")
    add("--keep-last", type=int, default=3, help="how many checkpoints stay; 0: all (3)")
    add("--seed", type=int, default=0, help="for weights (the same on all nodes) and data (0)")
    add("--text", type=Path, metavar="FILE", help="what to learn (this project's own text)")
    add("--diary", type=Path, metavar="FILE", help="note each acknowledged upload there")
    words = "wait at each boundary until that round's global model is there"
    add("--lockstep", action="store_true", help=words)
    words = "an option of the coordinator as JSON, such as poll_seconds=0.2"
    add("--set", action="append", default=[], metavar="NAME=VALUE", help=words)
    return parser


def _positive(word: str) -> int:
    if not word.isascii() or not word.isdigit() or not 0 < len(word) <= 12 or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word!r} is not a whole number above 0")
    return int(word)


def _run(options: argparse.Namespace) -> int:
    model = new_model(options.seed)
    split = split_text(options.text)
    own = _own_share(split.training, options)
    manager = CheckpointManager(
        options.dir,
        every_steps=options.every or options.inner_steps,
        keep_last=options.keep_last or None,
    )
    trainer = Trainer(
        model,
        torch.optim.AdamW(model.named_parameters(), lr=LR),
        Crops(own, batch=options.batch, positions=POSITIONS),
        device="cpu",
        config=_config(options, len(own)),
        precision="fp32",
        checkpoint_manager=manager,
        max_steps=options.rounds * options.inner_steps,
        grad_clip=GRAD_CLIP,
        save_final=True,
    )
    trainer.coordinator = _coordinator(options, trainer)
    return trainer.fit(resume="auto").exit_code


def _coordinator(options: argparse.Namespace, trainer: Trainer) -> DumbDiLoCoCoordinator | None:
    if options.url is None:
        return None
    given = json.loads(options.store_options.read_text()) if options.store_options else {}
    store = AcknowledgingStore.open(options.url, options=given)
    assert isinstance(store, AcknowledgingStore)
    store.diary = options.diary
    return DumbDiLoCoCoordinator(
        trainer.model,
        store,
        node_id=options.node_id,
        role=options.role,
        samples=lambda: trainer.samples,
        **_settings(options),
    )


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    settings: dict[str, Any] = {"inner_steps": options.inner_steps, "reset_inner": "never"}
    if options.lockstep:
        quorum = len(_nodes(options))
        settings |= {"synchronous": True, "await_global": True, "quorum": quorum}
    for word in options.set:
        name, _, value = word.partition("=")
        try:
            settings[name] = json.loads(value)
        except ValueError:
            settings[name] = value
    return settings


def _nodes(options: argparse.Namespace) -> list[str]:
    return [node for node in options.nodes.split(",") if node] or [options.node_id]


def _own_share(training: torch.Tensor, options: argparse.Namespace) -> torch.Tensor:
    """The part of the text that is this node's; from here on it draws its own random numbers."""
    index, count = shard_for(options.node_id, _nodes(options))
    torch.manual_seed(seed_for(options.node_id, options.seed))
    return torch.cat(torch.split(training, BLOCK)[index::count])


def _config(options: argparse.Namespace, characters: int) -> dict[str, Any]:
    return {
        "model": {"vocabulary": VOCABULARY, "positions": POSITIONS, **SHAPE},
        "training": {"batch": options.batch, "lr": LR, "seed": options.seed},
        "text": {"characters": characters, "nodes": sorted(_nodes(options))},
    }


def _fail(options: argparse.Namespace, words: object, code: int) -> int:
    sys.stderr.write(f"{options.node_id}: {words}\n")
    return code


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    sys.stderr.write(f"warning: {message}\n")


if __name__ == "__main__":
    sys.exit(main())
