"""The place in the data: where it is found exactly, without reading, and where it is not, in words.

That nothing differs after a resume is the affair of test_exact_resume.py.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, ClassVar

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler

from trainer_core import ResumeWarning, Trainer
from trainer_core.data.feed import Feed
from trainer_core.rng import capture_rng_state, restore_rng_state
from trainer_core.state import CheckpointError

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]


class Counted(Dataset[int]):
    """Gives the index, and notes what was read."""

    def __init__(self, length: int = 10) -> None:
        self.length, self.read = length, []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


def loader(dataset: Any = None, **options: Any) -> DataLoader[Any]:
    return DataLoader(Counted() if dataset is None else dataset, batch_size=2, **options)


def take(feed: Feed, count: int) -> list[Any]:
    return [_plain(batch) for batch in islice(feed.batches(), count)]


def _plain(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def moved(source: Any, target: Any, count: int) -> tuple[Feed, list[str]]:
    """A feed of `target` at the place where one of `source` is after `count` batches."""
    first = Feed(source)
    take(first, count)
    state = copy.deepcopy(first.state_dict())
    feed = Feed(target)
    doubts = feed.doubts(state)
    feed.load_state_dict(state)
    return feed, doubts + feed.start()


def test_nothing_is_read_twice_where_indices_are_known() -> None:
    first, dataset = Counted(1000), Counted(1000)
    feed, doubts = moved(loader(first, shuffle=True), loader(dataset, shuffle=True), 400)
    assert (feed.epoch, feed.batch, doubts, dataset.read) == (0, 400, [], first.read)
    take(feed, 1)
    assert len(dataset.read) == len(first.read) + 2 == 802


def test_a_list_is_not_gone_through_again() -> None:
    feed, doubts = moved([1, 2, 3], [1, 2, 3], 5)
    assert (feed.epoch, feed.batch, doubts) == (1, 2, [])
    assert take(feed, 3) == [3, 1, 2]


def test_a_place_is_plain_and_says_where() -> None:
    feed = Feed(loader())
    assert feed.state_dict() == {"kind": "DataLoader", "epoch": 0, "batch": 0}
    take(feed, 7)
    state = feed.state_dict()
    assert (state["kind"], state["epoch"], state["batch"]) == ("DataLoader", 1, 2)
    assert state["last"] == [2, 2, 3]  # two indices: 2 and 3


def test_the_callers_loader_stays_as_it_is() -> None:
    own = loader(shuffle=True)
    sampler = own.batch_sampler
    take(Feed(own), 3)
    assert own.batch_sampler is sampler and own._iterator is None


def test_the_batches_are_those_of_the_loader_itself() -> None:
    for options in ({"shuffle": True}, {"generator": torch.Generator().manual_seed(3)}, {}):
        torch.manual_seed(0)
        expected = [batch.tolist() for batch in copy.deepcopy(loader(**options))]
        after = torch.get_rng_state()
        torch.manual_seed(0)
        assert take(Feed(loader(**options)), 5) == expected
        assert torch.equal(torch.get_rng_state(), after)


def test_a_waiting_place_is_given_back_as_it_was() -> None:
    first = Feed(loader(shuffle=True))
    take(first, 3)
    state = first.state_dict()
    feed = Feed(loader(shuffle=True))
    feed.load_state_dict(state)
    assert feed.is_waiting and feed.state_dict() == state


def test_passes_are_told_to_what_shuffles_by_them() -> None:
    class Sampler(SequentialSampler):
        epochs: ClassVar[list[int]] = []

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    def made() -> DataLoader[Any]:
        return loader(sampler=Sampler(Counted()))

    feed, _ = moved(made(), made(), 12)
    take(feed, 5)
    assert Sampler.epochs == [0, 1, 2, 2, 3]


# Where it is uncertain


def test_an_iterator_goes_on_from_wherever_it_stands() -> None:
    feed, doubts = moved(iter([1, 2, 3]), iter([7, 8]), 2)
    assert doubts == ["the loader is an iterator, and goes on from wherever it stands"]
    assert take(feed, 9) == [7, 8]


def test_without_a_place_or_with_another_kinds_a_new_pass_begins() -> None:
    feed = Feed([1, 2])
    assert feed.doubts(None) == ["the checkpoint does not say where in the data it was"]
    assert feed.doubts({"kind": 3}) == ["what is saved is no place"]
    assert feed.doubts({"kind": "list", "epoch": 0, "batch": -1}) == [
        "the numbers of pass and batch are no counts"
    ]
    feed, doubts = moved(loader(), [1, 2], 3)
    assert doubts == ["the place is one in a loader of another kind (DataLoader)"]
    assert take(feed, 3) == [1, 2, 1]


def test_other_data_are_noticed() -> None:
    _, doubts = moved([1, 2, 3], [1, 2, 3, 4], 2)
    assert doubts == ["the list had 3 batches, here 4"]
    other = "the sampler gives other indices here, or batches of another size"
    _, doubts = moved(loader(shuffle=True), loader(Counted(11), shuffle=True), 2)
    assert doubts == [other]
    _, doubts = moved(loader(), DataLoader(Counted(), batch_size=3), 2)
    assert doubts == [other]
    _, doubts = moved(loader(), loader(Counted(4)), 3)
    assert doubts == ["the pass is shorter here than the place in it that was saved"]


def test_other_workers_are_noticed_where_it_matters() -> None:
    def made(workers: int, dataset: Any = None) -> DataLoader[Any]:
        return loader(dataset, num_workers=workers)

    assert moved(made(1), made(2), 2)[1] == []
    words = "0 worker processes made the batches, here 2 do"
    assert moved(made(0), made(2), 2)[1] == [words]
    assert moved(made(1, Stream()), made(2, Stream()), 2)[1] == [words.replace("0", "1")]


def test_workers_without_an_order_are_noticed() -> None:
    def made() -> DataLoader[Any]:
        return loader(num_workers=2, in_order=False)

    words = "workers gave their batches in no fixed order (in_order=False)"
    assert moved(made(), made(), 2)[1] == [words]


class Drawing(BatchSampler):
    """Draws anew before each batch, from the process's own generator."""

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(5):
            yield [random.randrange(10), random.randrange(10)]


def test_a_sampler_that_draws_in_between_is_noticed() -> None:
    def made() -> DataLoader[Any]:
        sampler = Drawing(SequentialSampler(Counted()), 2, False)
        return DataLoader(Counted(), batch_sampler=sampler)

    words = "the sampler draws random numbers of this process between two batches"
    assert moved(made(), made(), 3)[1] == [words]
    assert moved(made(), made(), 1)[1] == []


class Stream(IterableDataset[int]):
    def __init__(self, draws: bool = False) -> None:
        self.draws = draws

    def __iter__(self) -> Iterator[int]:
        for index in range(10):
            yield index + (random.random() if self.draws else 0)


def test_a_stream_that_draws_alone_is_certain() -> None:
    assert moved(loader(Stream()), loader(Stream()), 3)[1] == []
    assert moved(loader(Stream(draws=True)), loader(Stream(draws=True)), 3)[1] == []


class Speaking(Stream):
    """A stream that says itself where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.at, self.read = 0, 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 10:
            self.at, self.read = self.at + 1, self.read + 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.at = state["at"]


def test_a_stream_that_says_where_it_is_is_not_read_again() -> None:
    dataset = Speaking()
    feed, doubts = moved(loader(Speaking()), loader(dataset), 3)
    assert doubts == [] and dataset.read == 0
    assert take(feed, 3) == [[6, 7], [8, 9], [0, 1]]


# The protocol


class Silent:
    def __init__(self, fails: bool = False) -> None:
        self.fails = fails

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))

    def state_dict(self) -> dict[str, int]:
        return {"at": 1}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        if self.fails:
            raise OSError("the index is gone")


def test_a_loader_that_refuses_its_place_is_an_error_and_then_begins_a_pass() -> None:
    first = Feed(Silent())
    take(first, 2)
    feed = Feed(Silent(fails=True))
    feed.load_state_dict(first.state_dict())
    words = r"data: the loader could not go to its place \(pass 0, batch 2\): the index is gone"
    with pytest.raises(CheckpointError, match=words):
        feed.start()
    assert take(feed, 2) == [0, 1]


def test_a_protocol_is_never_asked_before_a_pass_has_begun() -> None:
    # StatefulDataLoader.state_dict would start its workers, and draw random numbers.
    feed = Feed(Silent())
    assert feed.state_dict() == {"kind": "stateful", "epoch": 0, "batch": 0}


def test_the_state_that_is_saved_does_not_go_on_changing() -> None:
    class Live(Silent):
        def __init__(self) -> None:
            super().__init__()
            self.state = {"at": 0}

        def __iter__(self) -> Iterator[int]:
            for index in range(9):
                self.state["at"] += 1
                yield index

        def state_dict(self) -> dict[str, int]:
            return self.state

    feed = Feed(Live())
    batches = feed.batches()
    next(batches)
    state = feed.state_dict()
    next(batches)
    assert state["loader"] == {"at": 1}


def test_worker_processes_end_with_a_fit_and_the_place_stays() -> None:
    feed = Feed(loader(num_workers=1))
    assert take(feed, 2) == [[0, 1], [2, 3]]
    feed.rest()
    assert feed.is_waiting and feed._iterator is None
    before = capture_rng_state()
    assert feed.start() == []
    restore_rng_state(before)
    assert take(feed, 2) == [[4, 5], [6, 7]]


def test_after_a_failure_in_reading_the_same_batch_is_tried_again() -> None:
    class Flaky(Counted):
        broken = True

        def __getitem__(self, index: int) -> int:
            if index == 5 and self.broken:
                raise OSError("try again")
            return super().__getitem__(index)

    dataset = Flaky()
    feed = Feed(loader(dataset))
    with pytest.raises(OSError, match="try again"):
        take(feed, 4)
    dataset.broken = False
    assert feed.start() == []
    assert take(feed, 2) == [[4, 5], [6, 7]]


def test_data_pipes_are_read_again() -> None:
    pytest.importorskip("torch.utils.data.datapipes")
    from torch.utils.data.datapipes.iter import IterableWrapper

    def made() -> DataLoader[Any]:
        return DataLoader(IterableWrapper(range(20)).shuffle(), batch_size=2)

    torch.manual_seed(3)
    first = Feed(made())
    expected = take(first, 10)
    torch.manual_seed(3)
    one = Feed(made())
    assert take(one, 4) == expected[:4]
    feed = Feed(made())
    feed.load_state_dict(one.state_dict())
    assert feed.start() == []
    assert take(feed, 6) == expected[4:]


class Noisy(IterableDataset[torch.Tensor]):
    """Draws from this process's own generator, as the model may."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(12):
            yield torch.full((2,), float(number)) + torch.randn(2)


@pytest.mark.parametrize("model_draws", [False, True])
def test_a_stream_that_draws_is_uncertain_only_if_the_model_draws_too(model_draws: bool) -> None:
    """Reading it again comes to the saved random numbers where nobody else had drawn any."""

    def begun(seed: int) -> Trainer:
        torch.manual_seed(seed)
        parts = [torch.nn.Linear(2, 2), *([torch.nn.Dropout(0.5)] if model_draws else [])]
        model = torch.nn.Sequential(*parts)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        loader = DataLoader(Noisy(), batch_size=2)
        return Trainer(
            model,
            optimizer,
            loader,
            loss_fn=lambda m, batch: m(batch).square().mean(),
            device="cpu",
        )

    whole = [record["loss"] for record in begun(1).fit(10).metrics]
    first = begun(1)
    first.fit(4)
    state = copy.deepcopy(first.state_dict())
    second = begun(2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        second.resume(state)
        losses = [record["loss"] for record in second.fit(10).metrics]
    assert losses == whole[4:]
    assert [warning.category for warning in caught] == [ResumeWarning] * model_draws
    words = "batches were read again, and that drew random numbers"
    assert all(words in str(warning.message) for warning in caught)
