"""Nothing that is shown contains a secret."""

import pytest

from fmsdata.storage.secrets import mask_password, mask_text, secrets_in


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("GET https://host/a?X-Amz-Signature=1f&b=2 failed", "GET https://host/a failed"),
        ("url='https://user:word@host:80/a?sig=x'", "url='https://host:80/a'"),
        ("(https://host/a?x=1)", "(https://host/a)"),
        ("s3://bucket/lang=de/part 0.arrow", "s3://bucket/lang=de/part 0.arrow"),
        ("what? no url", "what? no url"),
    ],
)
def test_secrets_in_urls_are_not_told(text: str, expected: str) -> None:
    assert mask_text(text) == expected


def test_known_secrets_are_masked_wherever_they_appear() -> None:
    assert mask_text("key AKIA of AKIA at s3://b?x=1", {"AKIA"}) == "key *** of *** at s3://b"


def test_a_shown_url_names_the_user_but_not_the_password() -> None:
    assert mask_password("https://me:hunter2@host:80/a") == "https://me:***@host:80/a"
    assert mask_password("https://host:80/a:b@c") == "https://host:80/a:b@c"


def test_secrets_are_found_at_any_depth_of_the_options() -> None:
    options = {
        "key": "AKIA",
        "anon": False,
        "endpoint_url": "https://host",
        "client_kwargs": {"aws_session_token": "token-1", "config": {"Password": "hunter2", "pin_key": "123"}},
    }
    assert secrets_in(options) == {"AKIA", "token-1", "hunter2"}
