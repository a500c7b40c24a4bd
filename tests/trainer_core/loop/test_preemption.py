"""Signals: the step that is at hand is finished, saved, and gone on from as if nothing had been."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.trainer_core.test_trainer import assert_equal, trainer
from trainer_core import Callback, CheckpointManager, TrainResult
from trainer_core.loop.preemption import SIGNALS, StopFlag, StopSignals, exit_code

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="needs POSIX signals")


class At(Callback):
    """Does something at a step."""

    def __init__(self, step: int, action: Any) -> None:
        self.step, self.action = step, action

    def on_step_end(self, trainer: Any, step: int, metrics: dict[str, Any]) -> None:
        if step == self.step:
            self.action()


def send(name: str) -> Any:
    return lambda: signal.raise_signal(getattr(signal, name))


def steps(directory: Path) -> list[int]:
    return sorted(int(path.stem[5:]) for path in directory.glob("step_*.pt"))


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 75), ("SIGUSR1", 75), ("SIGINT", 130)])
def test_a_signal_ends_the_fit_with_a_checkpoint(tmp_path: Path, name: str, code: int) -> None:
    manager = CheckpointManager(tmp_path, every_steps=100)
    result = trainer(checkpoint_manager=manager, callbacks=[At(5, send(name))]).fit(20)
    assert (result.steps, result.stopped_by, result.exit_code) == (5, f"signal {name}", code)
    assert steps(tmp_path) == [5]
    assert not (tmp_path / ".writer.lock").exists()


def test_a_fit_that_was_not_stopped_says_so(tmp_path: Path) -> None:
    result = trainer(checkpoint_manager=CheckpointManager(tmp_path)).fit(3)
    assert (result.stopped_by, result.exit_code) == (None, 0)
    assert exit_code("signal SIGTERM") == 75
    assert exit_code("a callback's reason") == 75


def test_stopped_and_resumed_is_never_interrupted(tmp_path: Path) -> None:
    whole = trainer()
    whole.fit(12)
    manager = CheckpointManager(tmp_path, every_steps=4)
    first = trainer(checkpoint_manager=manager, callbacks=[At(7, send("SIGTERM"))])
    assert first.fit(12).steps == 7
    again = CheckpointManager(tmp_path, every_steps=4)
    state = again.load_latest()
    assert state is not None
    second = trainer(checkpoint_manager=again)
    second.resume(state)
    assert second.fit(12).steps == 12
    assert_equal(second.model, whole.model)


@pytest.mark.parametrize("at", [1, 2, 3])
def test_the_flag_is_looked_at_after_each_micro_batch(tmp_path: Path, at: int) -> None:
    """In the middle of a step: what was accumulated is part of the checkpoint."""
    seen = 0

    def loss(model: Any, batch: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen == 8 + at:
            signal.raise_signal(signal.SIGTERM)
        return model(*batch)

    options: dict[str, Any] = {"accumulation_steps": 4}
    whole = trainer(**options)
    whole.fit(4)
    manager = CheckpointManager(tmp_path, every_steps=100)
    first = trainer(loss_fn=loss, checkpoint_manager=manager, **options)
    assert first.fit(4).steps == 2
    assert seen == 8 + at
    state = manager.load_latest()
    assert state is not None
    second = trainer(**options)
    second.resume(state)
    second.fit(4)
    assert_equal(second.model, whole.model)


def test_evaluation_can_ask_and_be_short(tmp_path: Path) -> None:
    rounds = []

    class Evaluates(Callback):
        def on_step_end(self, trainer: Any, step: int, metrics: dict[str, Any]) -> None:
            if step != 3:
                return
            for number in range(1000):
                if trainer.should_stop():
                    break
                rounds.append(number)
                if number == 10:
                    signal.raise_signal(signal.SIGTERM)

    manager = CheckpointManager(tmp_path, every_steps=100)
    result = trainer(checkpoint_manager=manager, callbacks=[Evaluates()]).fit(20)
    assert rounds == list(range(11))
    assert (result.steps, steps(tmp_path)) == (3, [3])


def test_a_callback_may_stop_as_well(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, every_steps=100)
    one = trainer(checkpoint_manager=manager)
    one._callbacks._hooks["on_step_end"].append(
        lambda trainer, step, metrics: trainer.stop("good enough") if step == 4 else None
    )
    result = one.fit(20)
    assert (result.steps, result.stopped_by, steps(tmp_path)) == (4, "good enough", [4])
    assert not one.should_stop()
    assert one.fit(6).steps == 6  # it is asked for anew


def test_a_stop_at_a_step_that_is_saved_already_saves_nothing_more(tmp_path: Path) -> None:
    saves = []
    manager = CheckpointManager(tmp_path, every_steps=4)

    class Notes(Callback):
        def on_save(self, trainer: Any, step: int, path: Path) -> None:
            saves.append(step)
            if step == 8:
                signal.raise_signal(signal.SIGTERM)

    assert trainer(checkpoint_manager=manager, callbacks=[Notes()]).fit(20).steps == 8
    assert saves == [4, 8]


def test_a_signal_at_the_last_step_is_a_fit_that_is_done(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, every_steps=100)
    result = trainer(checkpoint_manager=manager, callbacks=[At(6, send("SIGTERM"))]).fit(6)
    assert (result.steps, result.stopped_by, result.exit_code) == (6, None, 0)
    assert steps(tmp_path) == [6]


def test_a_second_interrupt_ends_at_once_and_damages_nothing(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, every_steps=2)

    class Twice(Callback):
        def on_step_end(self, trainer: Any, step: int, metrics: dict[str, Any]) -> None:
            if step == 5:
                signal.raise_signal(signal.SIGINT)
                assert trainer.should_stop()
                signal.raise_signal(signal.SIGINT)
                raise AssertionError("went on")

    one = trainer(checkpoint_manager=manager, callbacks=[Twice()])
    with pytest.raises(KeyboardInterrupt):
        one.fit(20)
    assert steps(tmp_path) == [2, 4]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not (tmp_path / ".writer.lock").exists()  # at once, though this process goes on
    assert not list(tmp_path.glob(".*"))
    state = CheckpointManager(tmp_path).load_latest()
    assert state is not None
    assert state["step"] == 4
    assert not one.should_stop()
    one._callbacks._hooks["on_step_end"].clear()
    assert one.fit(8).steps == 8  # and it may be gone on with
    assert steps(tmp_path) == [4, 6, 8]


@pytest.mark.parametrize("beside", [False, True])
def test_a_second_interrupt_in_the_middle_of_a_save(tmp_path: Path, beside: bool) -> None:
    """The writing is slow; the child is interrupted twice while it writes step 4."""
    program = textwrap.dedent(
        """
        import signal, sys, time
        from pathlib import Path
        from trainer_core import CheckpointManager
        from trainer_core.saving import saver
        from tests.trainer_core.loop.test_preemption import trainer
        plain = saver.publish
        def publish(content, path, **options):
            if path.name.startswith("step_000000000004"):
                write = content.write
                def slowly(file):
                    plain_write = file.write
                    def one(data):
                        print("writing", flush=True)
                        time.sleep(0.2)
                        return plain_write(data)
                    file.write = one
                    write(file)
                content.write = slowly
            return plain(content, path, **options)
        saver.publish = publish
        manager = CheckpointManager(sys.argv[1], every_steps=2, async_save=sys.argv[2] == "True")
        def slow(model, batch):
            time.sleep(0.02)
            return model(*batch)
        trainer(checkpoint_manager=manager, loss_fn=slow).fit(400)
        """
    )
    command = [sys.executable, "-c", program, str(tmp_path), str(beside)]
    root = Path(__file__).resolve().parents[3]
    pipe = subprocess.PIPE
    child = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=root)
    assert child.stdout is not None
    assert child.stdout.readline() == "writing\n"
    assert [path.name for path in tmp_path.glob(".step*")] != []
    for _ in range(2):
        child.send_signal(signal.SIGINT)
        time.sleep(0.1)
    began = time.monotonic()
    _, said = child.communicate(timeout=600)
    assert time.monotonic() - began < 45
    assert child.returncode in (1, -signal.SIGINT, 130), said
    assert "KeyboardInterrupt" in said
    left = {path.name for path in tmp_path.iterdir()}
    assert {"latest.json", "step_000000000002.pt"} <= left
    assert not {name for name in left if name.startswith((".step", ".latest"))}
    state = CheckpointManager(tmp_path).load_latest()
    assert state is not None
    assert state["step"] == 2


def test_handlers_are_put_back(tmp_path: Path) -> None:
    before = {name: signal.getsignal(getattr(signal, name)) for name in SIGNALS}
    during = {}

    def look() -> None:
        during.update({name: signal.getsignal(getattr(signal, name)) for name in SIGNALS})

    for manager in (None, CheckpointManager(tmp_path, enabled=False), CheckpointManager(tmp_path)):
        trainer(checkpoint_manager=manager, callbacks=[At(1, look)]).fit(1)
        assert {name: signal.getsignal(getattr(signal, name)) for name in SIGNALS} == before
        # Where nothing can be saved, a signal does what it always did.
        assert (during == before) == (manager is None or not manager.enabled)
    with pytest.raises(ZeroDivisionError):
        trainer(
            checkpoint_manager=CheckpointManager(tmp_path), callbacks=[At(1, lambda: 1 / 0)]
        ).fit(1)
    assert {name: signal.getsignal(getattr(signal, name)) for name in SIGNALS} == before


def test_no_handler_is_set_off_the_main_thread(tmp_path: Path) -> None:
    before = {name: signal.getsignal(getattr(signal, name)) for name in SIGNALS}
    found: list[Any] = []

    def look() -> None:
        found.append({name: signal.getsignal(getattr(signal, name)) for name in SIGNALS})

    def fit() -> None:
        manager = CheckpointManager(tmp_path, every_steps=1)
        found.append(trainer(checkpoint_manager=manager, callbacks=[At(1, look)]).fit(1))

    thread = threading.Thread(target=fit)
    thread.start()
    thread.join()
    assert found[0] == before
    assert isinstance(found[1], TrainResult)
    assert steps(tmp_path) == [1]


def test_a_handler_of_the_program_gets_its_signal_when_the_checkpoint_is_safe(
    tmp_path: Path,
) -> None:
    def handler(number: int, frame: Any) -> None:
        raise SystemExit(f"{signal.Signals(number).name} with {steps(tmp_path)}")

    before = signal.signal(signal.SIGTERM, handler)
    try:
        manager = CheckpointManager(tmp_path, every_steps=100)
        with pytest.raises(SystemExit, match=r"SIGTERM with \[5\]"):
            trainer(checkpoint_manager=manager, callbacks=[At(5, send("SIGTERM"))]).fit(20)
        assert signal.getsignal(signal.SIGTERM) == handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_what_is_ignored_stays_ignored(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        manager = CheckpointManager(tmp_path)
        result = trainer(checkpoint_manager=manager, callbacks=[At(5, send("SIGINT"))]).fit(8)
        assert (result.steps, result.stopped_by) == (8, None)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_that_was_set_meanwhile_stays() -> None:
    def other(number: int, frame: Any) -> None:
        raise AssertionError

    before = signal.getsignal(signal.SIGUSR1)
    try:
        with StopSignals(lambda reason: None):
            signal.signal(signal.SIGUSR1, other)
        assert signal.getsignal(signal.SIGUSR1) == other
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_forked_worker_is_not_stopped_by_them() -> None:
    reasons: list[str] = []
    with StopSignals(reasons.append):
        pid = os.fork()
        if pid == 0:
            for name in ("SIGINT", "SIGINT"):
                signal.raise_signal(getattr(signal, name))
            os._exit(len(reasons))
        assert os.waitpid(pid, 0)[1] == 0


def test_the_first_reason_stays() -> None:
    flag = StopFlag()
    flag.set("one")
    flag.set("other")
    assert (flag.reason, flag.is_set) == ("one", True)
    assert flag.agree()
    flag.clear()
    assert (flag.reason, flag.is_set) == (None, False)


WORKERS = textwrap.dedent(
    """
    import os, signal, sys, torch
    from torch.utils.data import DataLoader, TensorDataset
    from trainer_core import CheckpointManager, Trainer
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 1)
    data = TensorDataset(torch.randn(400, 6), torch.randn(400, 1))
    def end(trainer, step, metrics):
        if step == 7:
            os.killpg(0, getattr(signal, sys.argv[2]))   # as a scheduler or a terminal does
    one = Trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.1),
        DataLoader(data, batch_size=4, num_workers=2, prefetch_factor=2), device="cpu",
        loss_fn=lambda model, batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1]),
        checkpoint_manager=CheckpointManager(sys.argv[1], every_steps=100), callbacks=[end])
    result = one.fit(90)
    print(result.steps, result.stopped_by, flush=True)
    sys.exit(result.exit_code)
    """
)


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 75), ("SIGINT", 130)])
def test_a_signal_to_the_whole_process_group_saves_too(
    tmp_path: Path, name: str, code: int
) -> None:
    command = [sys.executable, "-c", WORKERS, str(tmp_path), name]
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    assert (done.stdout, done.returncode) == (f"7 signal {name}\n", code), done.stderr
    assert steps(tmp_path) == [7]


RANKS = textwrap.dedent(
    """
    import os, signal, sys, torch
    import torch.distributed as dist
    from pathlib import Path
    from tests.trainer_core.loop.test_preemption import At, trainer
    from tests.trainer_core.test_trainer import net
    from trainer_core import CheckpointManager
    rank = int(sys.argv[2])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=rank,
                            world_size=2)
    manager = CheckpointManager(Path(sys.argv[1], str(rank)), every_steps=100)
    act = [At(5, lambda: os.kill(os.getpid(), signal.SIGTERM))] if rank == 1 else []
    # Its gradients are reduced over both: a rank that goes on alone hangs for ever.
    model = torch.nn.parallel.DistributedDataParallel(net())
    result = trainer(checkpoint_manager=manager, callbacks=act, model=model).fit(50)
    print(result.steps, result.stopped_by, flush=True)
    dist.destroy_process_group()
    sys.exit(result.exit_code)
    """
)


def test_a_rank_that_trains_alone_asks_nobody() -> None:
    """The process group may be there for something else."""
    program = textwrap.dedent(
        """
        import sys, torch
        import torch.distributed as dist
        from tests.trainer_core.test_trainer import trainer
        from trainer_core.site.ranks import site_of
        store = dist.HashStore()
        dist.init_process_group("fake", store=store, rank=0, world_size=2)
        one = trainer()
        print(site_of(one.model), one.fit(3).steps)
        """
    )
    root = Path(__file__).resolve().parents[3]
    program = "import torch.testing._internal.distributed.fake_pg\n" + program
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=600)
    assert done.stdout == "None 3\n", done.stderr


def test_ranks_agree_on_when_to_stop(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[3]
    pipe = subprocess.PIPE
    children = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", RANKS, str(tmp_path), str(rank)],
            stdout=pipe,
            stderr=pipe,
            text=True,
            cwd=root,
        )
        for rank in range(2)
    ]
    said = [child.communicate(timeout=600) for child in children]
    shown = [out for out, _ in said]
    assert shown == ["5 signal SIGTERM\n"] * 2, said
    assert [child.returncode for child in children] == [75, 75]
    assert [steps(tmp_path / str(rank)) for rank in range(2)] == [[5], []]  # rank 0 writes


RANDOM_MOMENTS = textwrap.dedent(
    """
    import hashlib, os, random, shutil, signal, sys, time, torch
    from pathlib import Path
    from tests.trainer_core.test_trainer import batches, net, adamw
    from trainer_core import CheckpointManager, Trainer
    torch.set_num_threads(1)
    root, wanted = Path(sys.argv[1]), int(sys.argv[2])
    random.seed(5)
    STEPS = 60

    def digest(model):
        return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))

    def train(directory, ready=None):
        def slowly(model, batch):
            time.sleep(0.0005)
            return model(*batch)
        manager = CheckpointManager(directory, every_steps=7, async_save=random.random() < 0.5)
        model = net()
        one = Trainer(model, adamw(model), batches(), device="cpu", accumulation_steps=2,
                      checkpoint_manager=manager, loss_fn=slowly, save_final=True,
                      callbacks=[ready] if ready else [])
        state = manager.load_latest()
        if state is not None:
            one.resume(state)
        result = one.fit(STEPS)
        return result, digest(model).hexdigest()

    class Ready:
        def on_fit_start(self, trainer):
            os.write(child_end, b"r")

    _, expected = train(root / "whole")
    signals = finished = 0
    directory = root / "run"
    while signals < wanted:
        parent_end, child_end = os.pipe()
        seed = random.random()
        pid = os.fork()
        if pid == 0:
            random.seed(seed)
            signal.signal(signal.SIGTERM, lambda *_: None)  # one that comes after the fit
            result, found = train(directory, Ready())
            (root / "result").write_text(f"{result.steps} {found}")
            os._exit(result.exit_code)
        os.close(child_end)
        os.read(parent_end, 1)
        os.close(parent_end)
        time.sleep(random.uniform(0, 0.05))
        os.kill(pid, signal.SIGTERM)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        steps, found = (root / "result").read_text().split()
        manager = CheckpointManager(directory)
        newest = manager.latest_valid_path()
        assert newest == manager.latest_path(), (newest, manager.latest_path())
        assert int(newest.stem[5:]) == int(steps), (newest, steps)   # not one step is lost
        left = [name for name in os.listdir(directory) if ".tmp-" in name or "lock" in name]
        assert not left, left
        if code == 75:
            signals += 1
            continue
        assert (code, int(steps)) == (0, STEPS), code
        assert found == expected
        finished += 1
        shutil.rmtree(directory)
    print(signals, finished > 0)
    """
)


@pytest.mark.parametrize("count", [8, pytest.param(50, marks=pytest.mark.slow)])
def test_sigterm_at_random_moments_loses_no_step_and_changes_no_bit(
    tmp_path: Path, count: int
) -> None:
    root = Path(__file__).resolve().parents[3]
    command = [sys.executable, "-c", RANDOM_MOMENTS, str(tmp_path), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{count} "), done.stdout
