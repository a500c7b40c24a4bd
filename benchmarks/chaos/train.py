"""A small training with durable saves, for others to kill from outside: `train.py DIRECTORY`.

Made for ckpt-chaos (CONTRIBUTING.md has the command): it ends this program before each of its
operations on files, or in the midst of one, runs it again, and compares what both came to.

It goes on from the newest checkpoint that can be proven, as `fit(resume="auto")` does, says from
which step, and writes the weights at the end to `final.pt`. All checkpoints stay, since ckpt-chaos
looks for them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

from trainer_core import CheckpointManager, Trainer

STEPS = 6
EVERY = 2


def trainer(manager: CheckpointManager) -> Trainer:
    """Dropout, shuffling and Adam's moments: a resume that keeps less than all ends otherwise."""
    torch.set_num_threads(1)
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.2), nn.Linear(32, 1))
    data = torch.utils.data.TensorDataset(torch.arange(48.0).reshape(12, 4) / 48)
    return Trainer(
        model,
        torch.optim.Adam(model.parameters(), lr=0.01),
        torch.utils.data.DataLoader(data, batch_size=2, shuffle=True),
        device="cpu",
        loss_fn=lambda model, batch: (model(batch[0]) - 1).square().mean(),
        checkpoint_manager=manager,
    )


def main(out: Path) -> None:
    """Trains to the end, from wherever an earlier run got to."""
    with CheckpointManager(out / "ckpt", every_steps=EVERY, keep_last=None) as manager:
        made = trainer(manager)
        state = manager.load_latest(fallback=True, unpointed=True)
        if state is not None:
            made.resume(state)
        print(f"resumed from step {made.step}", flush=True)
        made.fit(STEPS)
    torch.save(dict(made.model.state_dict()), out / "final.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
