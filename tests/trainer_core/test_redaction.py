"""No secret of a config gets into a checkpoint, and no other key is lost."""

import argparse
import dataclasses
import datetime
import enum
import io
import pathlib
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.model.secrets import is_secret_key as tool_calls_it_a_secret
from trainer_core import redact


class Color(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    LOW = 1


def loaded_safely(state: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize(
    "key",
    [
        *("token", "hf_token", "HF_TOKEN", "hfToken", "hftoken", "access_token", "id_token"),
        *("auth_token", "api_tokens", "password", "passwd", "db_password", "userPassword", "pwd"),
        *("passphrase", "secret", "client-secret", "SECRET_KEY", "credential", "credentials"),
        *("api_key", "apikey", "API_KEY", "apiKey", "APIKey", "x-api-key", "wandb_api_key"),
        *("access_key", "aws_access_key_id", "private_key", "privateKey", "auth", "basic_auth"),
        *("Authorization", "cookie", "ssh_key", "encryption_key"),
    ],
)
def test_secret_keys(key: str) -> None:
    assert redact({key: "s3cret"}) == {key: "<redacted>"}
    assert redact({"a": [{"b": ({key: ["s3cret", {"c": "s3cret"}]},)}]}) == {
        "a": [{"b": [{key: "<redacted>"}]}]
    }
    # An unset one is no secret, and worth knowing of.
    assert redact({key: None}) == {key: None}
    assert redact({key: False}) == {key: False}


@pytest.mark.parametrize(
    "key",
    [
        *("tokens", "num_tokens", "max_tokens", "tokens_per_step", "tokenizer", "tokenizer_name"),
        *("max_token", "pad_token", "eos_token_id", "token_type_ids", "token_dropout", "n_token"),
        *("tokenized", "special_tokens", "author", "authors", "key", "keys", "num_key_value_heads"),
        *("hidden_size", "monkey", "keyboard", "passes", "compass", "cwd", "accessor", "publickey"),
    ],
)
def test_keys_that_only_look_like_secrets(key: str) -> None:
    assert redact({key: "plain", "n": {key: 512}}) == {key: "plain", "n": {key: 512}}


@given(st.from_regex(r"([a-zA-Z]{1,8}[_. -]?){1,4}", fullmatch=True) | st.text(max_size=20))
def test_whatever_the_tool_would_call_an_unredacted_secret_is_redacted(key: str) -> None:
    if tool_calls_it_a_secret(key):
        assert redact({key: "value"}) == {key: "<redacted>"}


@pytest.mark.parametrize("word", ["token", "secret", "password", "api_key", "credentials"])
@given(before=st.text("abcXYZ_-. 09", max_size=6))
def test_the_tool_agrees_with_any_prefix(word: str, before: str) -> None:
    key = f"{before}_{word}"
    if tool_calls_it_a_secret(key):
        assert redact({key: "value"}) == {key: "<redacted>"}


@dataclasses.dataclass
class Inner:
    password: str = "hunter2"
    size: int = 3


@dataclasses.dataclass
class Outer:
    inner: Inner = dataclasses.field(default_factory=Inner)
    runs: list[Inner] = dataclasses.field(default_factory=lambda: [Inner()])
    api_key: str | None = None


class WithToDict:
    """Its own `to_dict` knows nothing of secrets."""

    def __init__(self) -> None:
        self.inner = Inner()

    def to_dict(self) -> dict[str, Any]:
        return {"token": "hf_x", "inner": self.inner, "lr": 0.1}


class Broken:
    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        raise RuntimeError("no")


class FakeMapping(Mapping[str, Any]):
    def __getitem__(self, key: str) -> Any:
        return {"token": "x", "lr": 1}[key]

    def __iter__(self) -> Iterator[str]:
        return iter(("token", "lr"))

    def __len__(self) -> int:
        return 2


INNER = {"password": "<redacted>", "size": 3}


@pytest.mark.parametrize(
    ("config", "plain"),
    [
        (None, None),
        ({}, {}),
        (Outer(), {"inner": INNER, "runs": [INNER], "api_key": None}),
        (WithToDict(), {"token": "<redacted>", "inner": INNER, "lr": 0.1}),
        ({"x": [WithToDict()]}, {"x": [{"token": "<redacted>", "inner": INNER, "lr": 0.1}]}),
        (argparse.Namespace(token="x", lr=1), {"token": "<redacted>", "lr": 1}),
        (types.SimpleNamespace(a=Inner()), {"a": INNER}),
        (FakeMapping(), {"token": "<redacted>", "lr": 1}),
    ],
)
def test_kinds_of_configs(config: Any, plain: Any) -> None:
    assert redact(config) == plain


@pytest.mark.parametrize("config", ["token=x", ["a"], 3, 1.5, b"x", (1, 2)])
def test_what_has_no_keys_is_no_config(config: Any) -> None:
    with pytest.raises(TypeError, match="a config is"):
        redact(config)


def test_values_become_plain_data() -> None:
    plain = redact(
        {
            "path": pathlib.PurePosixPath("/a/b"),
            "enum": Color.RED,
            "level": Level.LOW,
            "lr": np.float32(0.5),
            "shape": np.array([1, 2]),
            "dtype": torch.bfloat16,
            "device": torch.device("cuda", 1),
            "names": {"b", "a"},
            "pair": (1, 2),
            "when": datetime.date(2024, 1, 2),
            "kind": dict,
            "tensor": torch.ones(3),
            "big": torch.ones(1001),
            "module": torch.nn.Linear(1, 1),
            "bytes": b"secret bytes",
            "object": object(),
            "broken": Broken(),
            Color.RED: 1,
            7: {None: True},
        }
    )
    assert plain == {
        "path": "/a/b",
        "enum": "red",
        "level": 1,
        "lr": 0.5,
        "shape": [1, 2],
        "dtype": "torch.bfloat16",
        "device": "cuda:1",
        "names": ["a", "b"],
        "pair": [1, 2],
        "when": "2024-01-02",
        "kind": "builtins.dict",
        "tensor": [1.0, 1.0, 1.0],
        "big": "<torch.Tensor>",
        "module": "<torch.nn.modules.linear.Linear>",
        "bytes": "<builtins.bytes>",
        "object": "<builtins.object>",
        "broken": f"<{__name__}.Broken>",
        "red": 1,
        7: {None: True},
    }
    assert loaded_safely(plain) == plain


def test_a_password_in_a_url_is_hidden() -> None:
    assert redact({"db": "postgres://me:hunter2@host:5432/x", "plain": "http://host:80/a@b"}) == {
        "db": "postgres://me:<redacted>@host:5432/x",
        "plain": "http://host:80/a@b",
    }


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("https://h/x?token=abc&page=2", "https://h/x?token=<redacted>&page=2"),
        ("https://h/blob?sv=2024&sig=a%2Fb", "https://h/blob?sv=2024&sig=<redacted>"),
        ("HF_TOKEN=abc python train.py", "HF_TOKEN=<redacted> python train.py"),
        ("train.py --api-key abc --lr 0.1", "train.py --api-key <redacted> --lr 0.1"),
        ("train.py --max-tokens 512 --seed=1", "train.py --max-tokens 512 --seed=1"),
        ("use hf_" + "a1" * 16 + " here", "use <redacted> here"),
        ("ghp_" + "Z9" * 18, "<redacted>"),
        ("AKIA" + "B2" * 8, "<redacted>"),
        ("sk-proj-" + "c3" * 20, "<redacted>"),
        (
            "https://hooks.slack.com/services/T0/B0/x9",
            "https://hooks.slack.com/services/<redacted>",
        ),
        ("task-sk-1 of hf_hub and a=b", "task-sk-1 of hf_hub and a=b"),
    ],
)
def test_secrets_within_a_text_are_hidden(text: str, hidden: str) -> None:
    assert redact({"note": text, "list": [text]}) == {"note": hidden, "list": [hidden]}
    assert redact({"note": hidden}) == {"note": hidden}


def test_redacting_twice_changes_nothing() -> None:
    once = redact({"token": "x", "url": "a://b:c@d", "deep": Outer()})
    assert redact(once) == once


def test_a_config_that_contains_itself_ends() -> None:
    config: dict[str, Any] = {"token": "x"}
    config["self"] = config
    assert redact(config) == {"token": "<redacted>", "self": "<builtins.dict>"}


def test_the_callers_config_is_not_changed() -> None:
    config = {"token": "x", "deep": [{"password": "y"}]}
    redact(config)
    assert config == {"token": "x", "deep": [{"password": "y"}]}
