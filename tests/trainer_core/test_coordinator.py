from collections.abc import Mapping
from typing import Any

import torch

from trainer_core import SyncCoordinator


class Complete:
    def start(self) -> None: ...

    def after_optimizer_step(self, model: torch.nn.Module, step: int) -> bool | None:
        return step % 2 == 0

    def stop(self) -> None: ...

    def state_dict(self) -> dict[str, Any] | None:
        return None

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def test_anything_with_the_five_methods_is_a_coordinator() -> None:
    coordinator: SyncCoordinator = Complete()  # the type checker looks at the signatures
    assert isinstance(coordinator, SyncCoordinator)


def test_without_any_one_of_them_it_is_none() -> None:
    names = ("start", "after_optimizer_step", "stop", "state_dict", "load_state_dict")
    for missing in names:
        kind = type(
            "Partial", (), {name: getattr(Complete, name) for name in names if name != missing}
        )
        assert not isinstance(kind(), SyncCoordinator), missing
